"""Documents in tables: Parquet files and Hugging Face datasets, a document per row."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fourbits.data.corpora.document import Document, Source, key_of
from fourbits.data.optional import load_datasets, load_pyarrow

HUB = "hf:"
# what datasets raises for a missing or damaged one, or for a connection that breaks
_UNREADABLE = (OSError, ValueError, RuntimeError)
_ROWS = 64  # at a time: a row may be a book


def read_parquet(files: Sequence[Path], root: Path, text_field: str) -> Iterator[Document]:
    """Every row's text, in order of files and rows; blank texts are left out.

    Raises ValueError naming a file that is damaged or has no such column of strings.
    """
    before = 0
    for path in files:
        arrow, size = load_pyarrow(path), path.stat().st_size
        try:
            with arrow.parquet.ParquetFile(path) as file:
                _check_column(arrow, file.schema_arrow, text_field, path)
                rows, number = file.metadata.num_rows, 0
                for batch in file.iter_batches(_ROWS, columns=[text_field]):
                    for value in batch.column(0):
                        number += 1
                        name = f"{path.relative_to(root).as_posix()}:{number}"
                        position = before + size * number // rows
                        yield from _row(value.as_py(), name, f"{path}: row {number}", position)
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}: not a readable Parquet file: {error}.") from error
        before += size


def _check_column(arrow: Any, schema: Any, text_field: str, path: Path) -> None:
    kinds = (arrow.string(), arrow.large_string())
    if text_field not in schema.names or schema.field(text_field).type not in kinds:
        raise ValueError(
            f"{path}: needs a column of strings called {text_field!r}; it has {', '.join(schema.names)}. "
            f"Name the column with --text-field."
        )


def _row(value: Any, name: str, place: str, position: int | None) -> Iterator[Document]:
    if value is None:
        return
    if not isinstance(value, str):
        raise ValueError(f"{place}: the text must be a string, got {type(value).__name__}.")
    if value.strip():
        yield Document(name, value, key_of(value), position=position)


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by `Dataset.save_to_disk`."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def saved_dataset(name: str, path: Path, text_field: str) -> Source:
    """The rows of a dataset that `save_to_disk` wrote."""
    files = tuple(sorted(p for p in path.rglob("*") if p.is_file()))

    def open_rows() -> Any:
        try:
            return load_datasets(path).load_from_disk(str(path))
        except _UNREADABLE as error:
            raise ValueError(f"{path}: cannot be opened: {_first_line(error)}.") from error

    licence = _licence(open_rows().info.license)
    return Source(name, files, lambda: _read_rows(open_rows(), str(path), text_field), licence)


def hub_dataset(given: str, text_field: str, name: str = "") -> Source:
    """A dataset by its name on the Hub, or a folder of data files: "hf:NAME[:CONFIG][@SPLIT]"; streamed.

    The split is "train" if none is named. Raises ValueError for a dataset that cannot be opened.
    """
    rest, _, split = given.removeprefix(HUB).partition("@")
    path, _, config = rest.partition(":")
    local = Path(path).resolve() if Path(path).is_dir() else None
    files = tuple(sorted(p for p in local.rglob("*") if p.is_file())) if local else ()
    library = load_datasets(given)

    def open_rows() -> tuple[Any, str]:
        try:
            builder = library.load_dataset_builder(str(local or path), config or None)
            return builder.as_streaming_dataset(split=split or "train"), builder.hash
        except _UNREADABLE as error:
            raise ValueError(f"{given}: cannot be opened: {_first_line(error)}.") from error

    rows, revision = open_rows()

    def read() -> Iterator[Document]:
        rows, now = open_rows()
        if now != revision:
            raise ValueError(f"{given}: changed meanwhile, from {revision} to {now}. Prepare it again.")
        return _read_rows(rows, given, text_field)

    identity = f"\n{path}\t{config}\t{split}\t{revision}"  # of the Hub: a commit
    return Source(name or Path(path).name, files, read, _licence(rows.info.license), identity)


def _read_rows(rows: Any, where: str, text_field: str) -> Iterator[Document]:
    for number, record in enumerate(_readable(rows, where), start=1):
        if text_field not in record:
            raise ValueError(
                f"{where}: needs a column called {text_field!r}; it has {', '.join(record)}. "
                f"Name the column with --text-field."
            )
        yield from _row(record[text_field], f"{where}:{number}", f"{where}: row {number}", None)


def _readable(rows: Any, where: str) -> Iterator[Mapping[str, Any]]:
    """Rows, until one cannot be read: a damaged file, a connection that breaks."""
    iterator, read = iter(rows), 0
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except _UNREADABLE as error:
            raise ValueError(
                f"{where}: cannot be read after row {read}: {_first_line(error)}. When that "
                f"is mended, the same command continues."
            ) from error
        yield row
        read += 1


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


def _licence(given: Any) -> str:
    return given if isinstance(given, str) else ""
