"""Reads tables, Parquet files and Hugging Face datasets, as one document per row."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fourbits.data.corpora.document import Document, Source, key_of
from fourbits.data.optional import load_datasets, load_pyarrow

HUB = "hf:"
# what `datasets` raises for a missing or damaged dataset, or when the connection breaks
_UNREADABLE = (OSError, ValueError, RuntimeError)
_BATCH_ROWS = 64  # a row may be a whole book


def read_parquet(path: Path, name: str, text_field: str, before: int) -> Iterator[Document]:
    """Yield every row's text, in order; blank texts and nulls are skipped.

    name, before: as for `read_text_file`. Raises ValueError for a file that is damaged or lacks a column
    `text_field` of strings, which may be stored as a dictionary (pandas' categories) or as views.
    """
    arrow, size = load_pyarrow(path), path.stat().st_size
    try:
        with arrow.parquet.ParquetFile(path) as file:
            _check_column(arrow, file.schema_arrow, text_field, path)
            rows, number = file.metadata.num_rows, 0
            for batch in file.iter_batches(_BATCH_ROWS, columns=[text_field]):
                for value in batch.column(0):
                    number += 1
                    position = before + size * number // rows
                    yield from _row(value.as_py(), f"{name}:{number}", f"{path}: row {number}", position)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file: {error}.") from error


def _check_column(arrow: Any, schema: Any, text_field: str, path: Path) -> None:
    if text_field in schema.names and _is_text(arrow.types, schema.field(text_field).type):
        return
    columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
    raise ValueError(
        f"{path}: needs a column {text_field!r} of strings; its columns are {columns}. Choose one with "
        f"--text-field (data.text_field)."
    )


def _is_text(types: Any, kind: Any) -> bool:
    if types.is_dictionary(kind):
        return _is_text(types, kind.value_type)
    views = getattr(types, "is_string_view", None)  # pyarrow 16
    return types.is_string(kind) or types.is_large_string(kind) or (views is not None and views(kind))


def _row(value: Any, name: str, place: str, position: int | None) -> Iterator[Document]:
    if value is None:
        return
    if not isinstance(value, str):
        raise ValueError(
            f"{place}: the text must be a string, got {type(value).__name__}. Choose a column of texts with "
            "--text-field (data.text_field)."
        )
    if value.strip():
        yield Document(name, value, key_of(value), position=position)


def is_saved_dataset(path: Path) -> bool:
    """Whether `Dataset.save_to_disk` wrote this folder."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def saved_dataset(name: str, path: Path, text_field: str) -> Source:
    """A source that reads the rows of a dataset written by `save_to_disk`."""
    files = tuple(sorted(p for p in path.rglob("*") if p.is_file()))

    def open_rows() -> Any:
        try:
            return load_datasets(path).load_from_disk(str(path))
        except _UNREADABLE as error:
            raise ValueError(f"{path}: cannot be opened: {_first_line(error)}.") from error

    licence = _licence(open_rows().info.license)
    return Source(name, files, lambda: _read_rows(open_rows(), str(path), text_field), licence)


def hub_dataset(spec: str, text_field: str, name: str = "") -> Source:
    """A source that streams a Hub dataset or a folder of data files, given as "hf:NAME[:CONFIG][@SPLIT]".

    The default split is "train". Raises ValueError for a dataset that cannot be opened.
    """
    rest, _, split = spec.removeprefix(HUB).partition("@")
    path, _, config = rest.partition(":")
    local = Path(path).resolve() if Path(path).is_dir() else None
    files = tuple(sorted(p for p in local.rglob("*") if p.is_file())) if local else ()
    library = load_datasets(spec)

    def open_rows() -> tuple[Any, str]:
        try:
            builder = library.load_dataset_builder(str(local or path), config or None)
            return builder.as_streaming_dataset(split=split or "train"), builder.hash
        except _UNREADABLE as error:
            raise ValueError(f"{spec}: cannot be opened: {_first_line(error)}.") from error

    rows, revision = open_rows()

    def read() -> Iterator[Document]:
        rows, new_revision = open_rows()
        if new_revision != revision:
            raise ValueError(f"{spec}: changed from {revision} to {new_revision}. Prepare it again.")
        return _read_rows(rows, spec, text_field)

    identity = f"\n{path}\t{config}\t{split}\t{revision}"  # on the Hub the revision is a commit
    return Source(name or Path(path).name, files, read, _licence(rows.info.license), identity)


def _read_rows(rows: Any, where: str, text_field: str) -> Iterator[Document]:
    for number, record in enumerate(_readable(rows, where), start=1):
        if text_field not in record:
            raise ValueError(
                f"{where}: needs a column {text_field!r}; its columns are {', '.join(record)}. "
                f"Choose one with --text-field."
            )
        yield from _row(record[text_field], f"{where}:{number}", f"{where}: row {number}", None)


def _readable(rows: Any, where: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows. Raises ValueError at one that cannot be read: a damaged file, a broken connection."""
    iterator, count = iter(rows), 0
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except _UNREADABLE as error:
            raise ValueError(
                f"{where}: cannot be read after row {count}: {_first_line(error)}. Fix that, then rerun the "
                f"command; it resumes."
            ) from error
        yield row
        count += 1


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


def _licence(value: Any) -> str:
    return value if isinstance(value, str) else ""
