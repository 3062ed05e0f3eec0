"""Documents in files: plain text and source code (a document per file), JSON lines; compressed or not.

.gz needs nothing, .zst needs pyarrow, which the extra `hf-data` brings.
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

# A larger file is read in pieces; and twice, as its split key is the hash of all of it.
LONG_FILE = 16 << 20
# A line of JSON is held whole, several times: as bytes, as text, as the text in it.
LONGEST_LINE = 64 << 20
_CHUNK_BYTES = 1 << 20


def is_text_file(path: Path) -> bool:
    """Whether `read_files` reads such a file, by its name."""
    return path.suffix in PLAIN + CODE or path.name.endswith(LINES + COMPRESSED)


def read_files(files: Sequence[Path], root: Path, text_field: str = TEXT_FIELD) -> Iterator[Document]:
    """Every document of the files, in order, named relative to root; blank texts are left out."""
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
    """The text of a UTF-8 file. Raises ValueError naming the file and, for bad bytes, where they are."""
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
    held: str | None = None
    with opened(path) as (file, raw):
        for piece in cut(_chunks(file, path)):
            if held is not None:
                yield Document(name, held, digest.hexdigest(), more=True, position=before + raw.tell())
            held = piece
    yield Document(name, held or "", digest.hexdigest(), position=before + path.stat().st_size)


def _chunks(file: IO[bytes], path: Path) -> Iterator[str]:
    """The text in chunks of about 1 MiB, each a whole number of characters."""
    offset, rest = 0, b""
    while raw := file.read(_CHUNK_BYTES):
        raw = rest + raw
        whole = len(raw)
        while whole and len(raw) - whole < 4 and raw[whole - 1] & 0xC0 == 0x80:  # the middle of a character
            whole -= 1
        whole -= 1 if whole and raw[whole - 1] >= 0xC0 else 0  # its first byte
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
    """A document per line: a JSON object with a string `text`, and maybe strings `name` and `split_key`."""
    with opened(path) as (file, raw):
        offset = 0
        for number, line_bytes in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
            if len(line_bytes) > LONGEST_LINE:
                raise ValueError(
                    f"{path}:{number}: a line has at most {LONGEST_LINE} bytes, this one has more. Split the "
                    f"document, or put it into a .txt file of its own, which is read in pieces."
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
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets in brackets
        raise ValueError(f"{place}: JSON that cannot be read: {error}.") from error
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{place}: each line must be an object with a string field {text_field!r}.")
    own_name, own_key = record.get("name"), record.get("split_key")
    try:
        key = key_of(text)
        f"{own_name}{own_key}".encode()
    except UnicodeEncodeError as error:
        where = "its text" if error.object is text else "its name and split_key"
        raise ValueError(f"{place}: character {error.start} of {where} is half of a surrogate.") from error
    return Document(
        own_name if isinstance(own_name, str) else name,
        text,
        own_key if isinstance(own_key, str) else key,
        position=position,
    )


@contextmanager
def opened(path: Path) -> Generator[tuple[IO[bytes], IO[bytes]]]:
    """The bytes of a file, decompressed, and the file as it is on disk, whose tell() is the progress.

    Raises ValueError naming a file that cannot be read, or is damaged or truncated.
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
