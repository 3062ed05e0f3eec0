"""Reads datasets of tasks from a folder of copies instead of the Hugging Face Hub.

FOLDER/OWNER/NAME is a copy of the dataset OWNER/NAME: its files as on the Hub, or a file for each split, such
as test.jsonl and validation.jsonl.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fourbits.data.optional import load_datasets

_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv", ".gz", ".zst", ".zip", ".py")


class MissingDatasetError(ValueError):
    """A task's dataset is neither in the folder nor in the cache, and cannot be downloaded."""


@contextmanager
def from_folder(folder: Path | None) -> Generator[None]:
    """Inside the block, datasets are read from `folder` only; without one, from the Hub or its local cache.

    Raises MissingDatasetError, naming the dataset and where to put it, if it is missing or cannot be read.
    """
    datasets: Any = load_datasets("tasks")
    load = datasets.load_dataset

    def local(path: str, *args: Any, **options: Any) -> Any:
        copy = None if folder is None else copy_of(path, folder)
        try:
            return load(path if copy is None else str(copy), *args, **options)
        except Exception as error:  # the library raises many kinds of errors, most of them its own
            raise MissingDatasetError(_why(path, copy, folder, error)) from error

    datasets.load_dataset = local
    try:
        yield
    finally:
        datasets.load_dataset = load


def copy_of(dataset: str, folder: Path) -> Path:
    """The copy of a dataset in a folder. Raises MissingDatasetError if there is none."""
    for place in (folder / dataset, folder / dataset.rpartition("/")[2]):
        if place.is_dir() and any(path.suffix in _SUFFIXES for path in place.rglob("*")):
            return place
    raise MissingDatasetError(
        f"{folder}: has no copy of the dataset {dataset}. Put its files into {folder / dataset}: "
        f"hf download {dataset} --repo-type dataset --local-dir {folder / dataset}"
    )


def _why(dataset: str, copy: Path | None, folder: Path | None, error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if copy is not None:
        return f"{copy}: cannot be read as the dataset {dataset}: {type(error).__name__}: {first}"
    return (
        f"the dataset {dataset} is not on this machine and cannot be downloaded ({type(error).__name__}: "
        f"{first[:120]}). Copy it elsewhere, with hf download {dataset} --repo-type dataset --local-dir "
        f"DIR/{dataset}, and pass --datasets DIR."
    )
