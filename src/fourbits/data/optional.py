"""Packages that only some readers need, imported late; the error names the extra to install."""

from types import ModuleType
from typing import Any


def load_pyarrow(what: Any) -> ModuleType:
    """pyarrow with its Parquet reader. Raises ValueError, about `what`, if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ValueError(f"{what}: needs pyarrow: pip install 'fourbits[hf-data]'.") from error
    return pyarrow


def load_datasets(what: Any) -> ModuleType:
    """Hugging Face datasets. Raises ValueError, about `what`, if it is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{what}: needs datasets: pip install 'fourbits[hf-data]'.") from error
    return datasets


def load_transformers(what: Any) -> ModuleType:
    """transformers. Raises ValueError, about `what`, if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"{what}: needs transformers: pip install 'fourbits[hf]'.") from error
    return transformers
