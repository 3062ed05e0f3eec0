"""Reads text files: plain text and source code (a document per file) and JSON lines, compressed or not.

.zst needs pyarrow, which is in the extra `hf-data`; .gz needs nothing.
"""

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fourbits.data.corpora.document import Document, key_of
from fourbits.data.corpora.pieces import cut
from fourbits.data.optional import load_pyarrow

PLAIN = (".txt", ".md", ".rst", ".tex", ".html")
CODE = (
    *(".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".go", ".rs", ".java", ".kt", ".scala"),
    *(".py", ".pyi", ".rb", ".php", ".pl", ".lua", ".sh", ".sql", ".r", ".jl", ".hs", ".ml", ".swift"),
    *(".js", ".jsx", ".ts", ".tsx", ".cs", ".S", ".s", ".asm", ".f90", ".proto", ".cmake", ".zig"),
)
LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
COMPRESSED = (".txt.gz", ".txt.zst", ".md.gz", ".md.zst")
TEXT_FIELD = "text"

# A larger file is read in pieces, and twice, because its split key is the hash of the whole text.
LONG_FILE = 16 << 20
# A JSON line is held in memory several times: as bytes, as a string, and as the text in it.
LONGEST_LINE = 64 << 20
_CHUNK_BYTES = 1 << 20


def is_text_file(path: Path) -> bool:
    """Whether `read_files` reads such a file, by its name."""
    return path.suffix in PLAIN + CODE or path.name.endswith(LINES + COMPRESSED)


def read_files(files: Sequence[Path], root: Path, text_field: str = TEXT_FIELD) -> Iterator[Document]:
    """Yield every document of the files, in order, with names relative to root; blank texts are skipped."""
    before = 0
    for path in files:
        name = path.relative_to(root).as_posix()
        if path.name.endswith(LINES):
            yield from _read_lines(path, name, text_field, before)
        elif path.name.endswith(COMPRESSED) or (path.is_file() and path.stat().st_size > LONG_FILE):
            yield from _read_long(path, name, before)
        else:
            text = read_text(path)
            if text.strip():
                yield Document(name, text, key_of(text), position=before + path.stat().st_size)
        before += path.stat().st_size


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises ValueError with the file and, for invalid bytes, their offset."""
    with opened(path) as (file, _):
        return _decode(file.read(), path, 0)


def _read_long(path: Path, name: str, before: int) -> Iterator[Document]:
    digest, blank = hashlib.sha256(), True
    with opened(path) as (file, _):
        for chunk in _chunks(file, path):
            digest.update(chunk.encode())
            blank = blank and not chunk.strip()
    if blank:
        return
    previous: str | None = None
    with opened(path) as (file, raw):
        for piece in cut(_chunks(file, path)):
            if previous is not None:
                yield Document(name, previous, digest.hexdigest(), more=True, position=before + raw.tell())
            previous = piece
    yield Document(name, previous or "", digest.hexdigest(), position=before + path.stat().st_size)


def _chunks(file: IO[bytes], path: Path) -> Iterator[str]:
    """Yield the text in chunks of about 1 MiB; no character is split."""
    offset, rest = 0, b""
    while raw := file.read(_CHUNK_BYTES):
        raw = rest + raw
        whole = len(raw)
        while whole and len(raw) - whole < 4 and raw[whole - 1] & 0xC0 == 0x80:  # a continuation byte
            whole -= 1
        whole -= 1 if whole and raw[whole - 1] >= 0xC0 else 0  # the first byte of a character
        yield _decode(raw[:whole], path, offset)
        offset, rest = offset + whole, raw[whole:]
    if rest:
        yield _decode(rest, path, offset)


def _decode(raw: bytes, path: Path, offset: int) -> str:
    try:
        return raw.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8: byte 0x{raw[error.start]:02x} at offset {offset + error.start}. "
            f"Convert the file, for example with iconv -t UTF-8."
        ) from error


def _read_lines(path: Path, name: str, text_field: str, before: int) -> Iterator[Document]:
    """Yield a document per line: a JSON object with a string `text`, and optional `name` and `split_key`."""
    with opened(path) as (file, raw):
        offset = 0
        for number, line_bytes in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
            if len(line_bytes) > LONGEST_LINE:
                raise ValueError(
                    f"{path}:{number}: the line is longer than {LONGEST_LINE} bytes, the limit. Split the "
                    f"document, or move it to a separate .txt file, which is read in pieces."
                )
            line = _decode(line_bytes, path, offset)
            offset += len(line_bytes)
            if not line.strip():
                continue
            position = before + (offset if raw is file else raw.tell())
            document = _parse_line(line, f"{path}:{number}", f"{name}:{number}", text_field, position)
            if document.text.strip():
                yield document


def _parse_line(line: str, place: str, name: str, text_field: str, position: int) -> Document:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error.msg} at column {error.colno}.") from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits; deep nesting
        raise ValueError(f"{place}: unreadable JSON: {error}.") from error
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{place}: each line must be an object with a string field {text_field!r}.")
    own_name, own_key = record.get("name"), record.get("split_key")
    try:
        key = key_of(text)
        f"{own_name}{own_key}".encode()
    except UnicodeEncodeError as error:
        where = "the text" if error.object is text else "name and split_key"
        raise ValueError(f"{place}: character {error.start} of {where} is a lone surrogate.") from error
    return Document(
        own_name if isinstance(own_name, str) else name,
        text,
        own_key if isinstance(own_key, str) else key,
        position=position,
    )


@contextmanager
def opened(path: Path) -> Generator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file for reading: the decompressed stream, and the file on disk, whose tell() shows progress.

    Raises ValueError for a file that cannot be read, or is damaged or truncated.
    """
    try:
        with path.open("rb") as raw:
            if path.suffix == ".gz":
                with io.BufferedReader(gzip.GzipFile(fileobj=raw), _CHUNK_BYTES) as file:  # pyright: ignore[reportArgumentType]
                    yield file, raw
            elif path.suffix == ".zst":
                stream: Any = load_pyarrow(path).CompressedInputStream(raw, "zstd")
                with io.BufferedReader(stream, _CHUNK_BYTES) as file:
                    yield file, raw
            else:
                yield raw, raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: damaged or truncated: {error}.") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}.") from error
