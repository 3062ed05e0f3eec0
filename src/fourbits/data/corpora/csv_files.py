"""Reads comma-separated tables with a header, compressed or not: a document per row, from one column."""

import csv
from collections.abc import Iterator
from pathlib import Path

from fourbits.data.corpora.document import Document, key_of
from fourbits.data.corpora.open_text import chunks, opened

# A field can hold a whole text, with line breaks; Python's limit, 128 KiB, holds for the process.
LONGEST_FIELD = 64 << 20
csv.field_size_limit(max(LONGEST_FIELD, csv.field_size_limit()))


def csv_problem(path: Path, text_field: str) -> str | None:
    """Why a file is not a table with this column, by its header, in a few words; None if it is."""
    with opened(path) as (file, _):
        try:
            header = next(csv.reader(_lines(chunks(file, path)), strict=True), None)
        except csv.Error:
            return "not a table"
    return None if header is None or text_field in header else f"without a column {text_field!r}"


def read_csv(path: Path, name: str, text_field: str, before: int) -> Iterator[Document]:
    """Yield every row's text; blank texts are skipped.

    name, before: as for `read_text_file`. Raises ValueError with the file, and the line, for a header without
    the column, a row that does not have as many fields as the header, or an unclosed quote.
    """
    with opened(path) as (file, raw):
        rows = csv.reader(_lines(chunks(file, path)), strict=True)
        try:
            column, width = _column(next(rows, None), text_field, path)
            for number, row in enumerate(rows, start=1):
                if row and len(row) != width:
                    raise ValueError(
                        f"{path}:{rows.line_num}: the row has {len(row)} fields, the header {width}. "
                        f"Quote texts that contain commas or line breaks."
                    )
                if row and (text := row[column]).strip():
                    yield Document(f"{name}:{number}", text, key_of(text), position=before + raw.tell())
        except csv.Error as error:
            raise ValueError(f"{path}:{rows.line_num}: not a valid row: {error}.") from error


def _column(header: list[str] | None, text_field: str, path: Path) -> tuple[int, int]:
    """The position of the text column, and the number of columns. An empty file has no header and no rows."""
    if header is not None and text_field not in header:
        raise ValueError(
            f"{path}: needs a column {text_field!r}; its columns are {', '.join(header)}. Choose one with "
            f"--text-field (data.text_field)."
        )
    return (header.index(text_field), len(header)) if header else (0, 0)


def _lines(parts: Iterator[str]) -> Iterator[str]:
    """The lines of a text, with their ends, from chunks of it."""
    pending: list[str] = []
    for part in parts:
        *whole, rest = part.split("\n")
        for line in whole:
            yield "".join((*pending, line, "\n"))
            pending.clear()
        pending.append(rest)
    if any(pending):
        yield "".join(pending)
