"""Documents from files: each folder or file that the user names is a source, each text in it a document.

Documents come in a fixed order (by path, then by line), so that everything built on them is deterministic. A
source also has a fingerprint: a hash of paths, sizes and modification times, which answers "is this still
what was prepared?" without reading the text.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

SUFFIXES = (".txt", ".md", ".py", ".jsonl")


@dataclass(frozen=True, slots=True)
class Document:
    """One text. split_key: documents with equal keys fall on the same side of the validation split."""

    name: str
    text: str
    split_key: str


@dataclass(frozen=True, slots=True)
class Source:
    """A named stream of documents. read() begins anew at each call; licence: an SPDX name if known."""

    name: str
    files: tuple[Path, ...]
    read: Callable[[], Iterator[Document]]
    licence: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of the files, for progress and rates."""
        return sum(path.stat().st_size for path in self.files)

    def fingerprint(self) -> str:
        """SHA-256 over path, size and modification time of every file."""
        digest = hashlib.sha256(self.name.encode())
        for path in self.files:
            stat = path.stat()
            digest.update(f"\n{path}\t{stat.st_size}\t{stat.st_mtime_ns}".encode())
        return digest.hexdigest()


def file_sources(paths: Sequence[str]) -> list[Source]:
    """One source per path; "NAME=PATH" names it, else the file's stem or the folder's name does.

    Raises ValueError for a missing path, a folder without text files, or an empty file that was named itself.
    """
    return [_source_of(*_name_and_path(given)) for given in paths]


def _name_and_path(given: str) -> tuple[str, Path]:
    name, equals, rest = given.partition("=")
    if equals and name.replace("-", "_").isidentifier():
        return name, Path(rest).resolve()
    path = Path(given).resolve()
    return (path.name if path.is_dir() else path.stem), path


def _source_of(name: str, path: Path) -> Source:
    if path.is_dir():
        files = tuple(sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file()))
        if not files:
            raise ValueError(f"{path}: no {', '.join(SUFFIXES)} file in this folder.")
        if not any(file.stat().st_size for file in files):
            raise ValueError(f"{path}: all {len(files)} text files in this folder are empty.")
        return Source(name, files, lambda: read_files(files, path))
    if not path.is_file():
        raise ValueError(f"{path}: no such file or folder.")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: the type must be one of {', '.join(SUFFIXES)}, got {path.suffix!r}.")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty.")
    return Source(name, (path,), lambda: read_files((path,), path.parent))


def read_files(files: Sequence[Path], root: Path) -> Iterator[Document]:
    """Every document of the files, in order, named relative to root; blank texts are left out."""
    for path in files:
        name = path.relative_to(root).as_posix()
        documents = _read_jsonl(path, name) if path.suffix == ".jsonl" else [_document(name, read_text(path))]
        yield from (document for document in documents if document.text.strip())


def _document(name: str, text: str) -> Document:
    # Equal texts have equal keys: no copy of a validation text is trained on.
    return Document(name, text, split_key=hashlib.sha256(text.encode()).hexdigest())


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises ValueError naming the file and, for bad bytes, where they are."""
    try:
        return _decode(path.read_bytes(), path, 0)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}.") from error


def _decode(raw: bytes, path: Path, offset: int) -> str:
    try:
        return raw.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8: byte 0x{raw[error.start]:02x} at offset {offset + error.start}. "
            f"Convert the file, for example with iconv -t UTF-8."
        ) from error


def _read_jsonl(path: Path, name: str) -> Iterator[Document]:
    """A document per line: a JSON object with a string `text`, and maybe strings `name` and `split_key`."""
    try:
        with path.open("rb") as file:
            offset = 0
            for number, raw in enumerate(file, start=1):
                line = _decode(raw, path, offset)
                offset += len(raw)
                if line.strip():
                    yield _parse_line(line, f"{path}:{number}", f"{name}:{number}")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}.") from error


def _parse_line(line: str, place: str, name: str) -> Document:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error.msg} at column {error.colno}.") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{place}: each line must be an object with a string field 'text'.")
    try:
        document = _document(name, text)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: character {error.start} of its text is half of a surrogate pair."
        ) from error
    own = {key: value for key in ("name", "split_key") if isinstance(value := record.get(key), str)}
    return replace(document, **own)
