"""Reads JSON lines, compressed or not: an object per line, with the text in one field."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fourbits.data.corpora.document import Document, key_of
from fourbits.data.corpora.open_text import decoded, opened

# A line is held in memory several times: as bytes, as a string, and as the text in it.
LONGEST_LINE = 64 << 20


def json_problem(path: Path, text_field: str) -> str | None:
    """Why a .json file is not JSON lines with this field, by its first line, in a few words; or None."""
    with opened(path) as (file, _):
        line = next(
            (line for line in iter(lambda: file.readline(LONGEST_LINE + 1), b"") if line.strip()), b""
        )
    try:
        record = json.loads(line.decode("utf-8-sig")) if line else None
    except (ValueError, RecursionError):
        return "not JSON lines"
    if line and not isinstance(record, dict):
        return "not JSON lines"
    return (
        f"without a field {text_field!r}" if isinstance(record, dict) and text_field not in record else None
    )


def read_json_lines(path: Path, name: str, text_field: str, before: int) -> Iterator[Document]:
    """Yield a document per line: a JSON object with a string `text`, and optional `name` and `split_key`.

    Blank lines, blank texts and a text of null are skipped. name, before: as for `read_text_file`. Raises
    ValueError with the file and the line for anything else.
    """
    with opened(path) as (file, raw):
        offset = 0
        for number, line_bytes in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
            if len(line_bytes) > LONGEST_LINE:
                raise ValueError(
                    f"{path}:{number}: the line is longer than {LONGEST_LINE} bytes, the limit. Split the "
                    f"document, or move it to a separate .txt file, which is read in pieces."
                )
            line = decoded(line_bytes, path, offset)
            offset += len(line_bytes)
            if not line.strip():
                continue
            position = before + (offset if raw is file else raw.tell())
            record = _record(line, f"{path}:{number}", text_field)
            if (record[text_field] or "").strip():
                yield _document(record, f"{path}:{number}", f"{name}:{number}", text_field, position)


def _record(line: str, place: str, text_field: str) -> dict[str, Any]:
    """The object of a line, whose text field is a string or null."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error.msg} at column {error.colno}.") from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits; deep nesting
        raise ValueError(f"{place}: unreadable JSON: {error}.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place}: each line must be an object with a string field {text_field!r}.")
    if text_field not in record:
        raise ValueError(
            f"{place}: each line must be an object with a string field {text_field!r}; this one has "
            f"{', '.join(map(repr, record)) or 'no fields'}. Choose one with --text-field (data.text_field)."
        )
    if not isinstance(record[text_field], str | None):
        raise ValueError(
            f"{place}: the field {text_field!r} must be a string or null, got "
            f"{type(record[text_field]).__name__}. Correct the line, or choose another field with "
            "--text-field (data.text_field)."
        )
    return record


def _document(record: dict[str, Any], place: str, name: str, text_field: str, position: int) -> Document:
    text, own_name, own_key = record[text_field], record.get("name"), record.get("split_key")
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
