"""Documents in tables: Parquet files and Hugging Face datasets, a document per row."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fourbits.data.corpus import Document, Source, key_of
from fourbits.data.optional import load_datasets, load_pyarrow

HUB = "hf:"
_ROWS = 1024


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
                    for value in batch.column(0).to_pylist():
                        number += 1
                        name = f"{path.relative_to(root).as_posix()}:{number}"
                        yield from _row(value, name, f"{path}: row {number}", before + size * number // rows)
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
    info = json.loads((path / "dataset_info.json").read_text(encoding="utf-8"))

    def read() -> Iterator[Document]:
        rows = load_datasets(path).load_from_disk(str(path))
        return _read_rows(rows, str(path), text_field)

    return Source(name, files, read, _licence(info.get("license")))


def hub_dataset(given: str, text_field: str, name: str = "") -> Source:
    """A dataset by its name on the Hub, or a folder of data files: "hf:NAME[:CONFIG][@SPLIT]"; streamed.

    The split is "train" if none is named. Raises ValueError for a dataset that cannot be opened.
    """
    rest, _, split = given.removeprefix(HUB).partition("@")
    path, _, config = rest.partition(":")
    local = Path(path).resolve() if Path(path).is_dir() else None
    files = tuple(sorted(p for p in local.rglob("*") if p.is_file())) if local else ()

    def open_rows() -> Any:
        options = {"name": config or None, "split": split or "train", "streaming": True}
        try:
            return load_datasets(given).load_dataset(str(local or path), **options)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{given}: cannot be opened: {str(error).splitlines()[0]}") from error

    rows = open_rows()
    identity = f"\n{path}\t{config}\t{split}\t{rows.info.version}\t{rows.info.download_checksums}"
    return Source(
        name or Path(path).name,
        files,
        lambda: _read_rows(open_rows(), given, text_field),
        _licence(rows.info.license),
        identity,
    )


def _read_rows(rows: Any, where: str, text_field: str) -> Iterator[Document]:
    for number, row in enumerate(rows, start=1):
        record: Mapping[str, Any] = row
        if text_field not in record:
            raise ValueError(
                f"{where}: needs a column called {text_field!r}; it has {', '.join(record)}. "
                f"Name the column with --text-field."
            )
        yield from _row(record[text_field], f"{where}:{number}", f"{where}: row {number}", None)


def _licence(given: Any) -> str:
    return given if isinstance(given, str) else ""
