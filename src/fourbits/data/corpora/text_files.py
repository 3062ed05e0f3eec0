"""Reads plain text and source code, compressed or not: a document per file, long ones in pieces."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from fourbits.data.corpora.document import Document, key_of
from fourbits.data.corpora.file_kinds import compression_of
from fourbits.data.corpora.open_text import chunks, decoded, opened
from fourbits.data.corpora.pieces import split_text

# A larger file is read in pieces, and twice, because its split key is the hash of the whole text.
LONG_FILE = 16 << 20


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises ValueError with the file and, for invalid bytes, their offset."""
    with opened(path) as (file, _):
        return decoded(file.read(), path, 0)


def read_text_file(path: Path, name: str, before: int) -> Iterator[Document]:
    """Yield the file's text as one document, in pieces if it is long or compressed; nothing if it is blank.

    name: of the document. before: bytes of the source's earlier files, for positions.
    """
    if compression_of(path) or (path.is_file() and path.stat().st_size > LONG_FILE):
        yield from _read_long(path, name, before)
    elif (text := read_text(path)).strip():
        yield Document(name, text, key_of(text), position=before + path.stat().st_size)


def _read_long(path: Path, name: str, before: int) -> Iterator[Document]:
    digest, blank = hashlib.sha256(), True
    with opened(path) as (file, _):
        for chunk in chunks(file, path):
            digest.update(chunk.encode())
            blank = blank and not chunk.strip()
    if blank:
        return
    previous: str | None = None
    with opened(path) as (file, raw):
        for piece in split_text(chunks(file, path)):
            if previous is not None:
                yield Document(name, previous, digest.hexdigest(), more=True, position=before + raw.tell())
            previous = piece
    yield Document(name, previous or "", digest.hexdigest(), position=before + path.stat().st_size)
