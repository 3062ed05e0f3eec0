"""The documents of files of any kind, in the order of the files."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fourbits.data.corpora.csv_files import csv_problem, read_csv
from fourbits.data.corpora.document import Document
from fourbits.data.corpora.file_kinds import kind_of
from fourbits.data.corpora.json_lines import json_problem, read_json_lines
from fourbits.data.corpora.tables import read_parquet
from fourbits.data.corpora.text_files import read_text_file

TEXT_FIELD = "text"


def problem_of(path: Path, text_field: str) -> str | None:
    """Why a file whose name fits does not hold texts, in a few words; None if it does or its name decides."""
    kind = kind_of(path)
    if path.stat().st_size == 0 or kind not in ("json", "csv"):
        return None
    return (json_problem if kind == "json" else csv_problem)(path, text_field)


def read_files(files: Sequence[Path], root: Path, text_field: str = TEXT_FIELD) -> Iterator[Document]:
    """Yield every document of the files, in order, with names relative to root; blank texts are skipped."""
    before = 0
    for path in files:
        yield from _read(path, path.relative_to(root).as_posix(), text_field, before)
        before += path.stat().st_size


def _read(path: Path, name: str, text_field: str, before: int) -> Iterator[Document]:
    kind = kind_of(path)
    if kind == "text":
        return read_text_file(path, name, before)
    if kind == "parquet":
        return read_parquet(path, name, text_field, before)
    if kind == "csv":
        return read_csv(path, name, text_field, before)
    return read_json_lines(path, name, text_field, before)
