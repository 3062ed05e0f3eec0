"""Opens a file of text, compressed or not, and decodes it in chunks; every error names the file.

.zst needs pyarrow, which is in the extra `hf-data`; .gz needs nothing.
"""

import gzip
import io
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fourbits.data.corpora.file_kinds import compression_of
from fourbits.data.optional import load_pyarrow
from fourbits.data.whole_file import system_remedy

_CHUNK_BYTES = 1 << 20


@contextmanager
def opened(path: Path) -> Generator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file for reading: the decompressed stream, and the file on disk, whose tell() shows progress.

    Raises ValueError for a file that cannot be read, or is damaged or truncated.
    """
    compression = compression_of(path)
    try:
        with path.open("rb") as raw:
            if compression == ".gz":
                with io.BufferedReader(gzip.GzipFile(fileobj=raw), _CHUNK_BYTES) as file:  # pyright: ignore[reportArgumentType]
                    yield file, raw
            elif compression == ".zst":
                stream: Any = load_pyarrow(path).CompressedInputStream(raw, "zstd")
                with io.BufferedReader(stream, _CHUNK_BYTES) as file:
                    yield file, raw
            else:
                yield raw, raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: damaged or truncated: {error}. Replace it with a whole copy.") from error
    except OSError as error:
        reason = f"{error.strerror or error}{system_remedy(error.errno)}"
        raise ValueError(f"{path}: cannot be read: {reason}.") from error


def chunks(file: IO[bytes], path: Path) -> Iterator[str]:
    """Yield the text in chunks of about 1 MiB; no character is split."""
    offset, rest = 0, b""
    while raw := file.read(_CHUNK_BYTES):
        raw = rest + raw
        whole = len(raw)
        while whole and len(raw) - whole < 4 and raw[whole - 1] & 0xC0 == 0x80:  # a continuation byte
            whole -= 1
        whole -= 1 if whole and raw[whole - 1] >= 0xC0 else 0  # the first byte of a character
        yield decoded(raw[:whole], path, offset)
        offset, rest = offset + whole, raw[whole:]
    if rest:
        yield decoded(rest, path, offset)


def decoded(raw: bytes, path: Path, offset: int) -> str:
    """UTF-8 bytes of a file, from `offset` on, as text. Raises ValueError with the offset of a wrong byte."""
    try:
        return raw.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8: byte 0x{raw[error.start]:02x} at offset {offset + error.start}. "
            f"Convert the file, for example with iconv -t UTF-8."
        ) from error
