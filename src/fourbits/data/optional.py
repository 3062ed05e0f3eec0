"""Packages that only some readers need, imported late; the error names the extra to install."""

from types import ModuleType
from typing import Any


def load_pyarrow(what: Any) -> ModuleType:
    """pyarrow with its Parquet reader. If it is not installed, raises ValueError that begins with `what`."""
    try:
        import pyarrow
        import pyarrow.parquet  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ValueError(f"{what}: needs pyarrow: pip install 'fourbits[hf-data]'.") from error
    return pyarrow


def load_datasets(what: Any) -> ModuleType:
    """Hugging Face datasets. If it is not installed, raises ValueError that begins with `what`."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{what}: needs datasets: pip install 'fourbits[hf-data]'.") from error
    return datasets


def load_transformers(what: Any) -> ModuleType:
    """transformers. If it is not installed, raises ValueError that begins with `what`."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"{what}: needs transformers: pip install 'fourbits[hf]'.") from error
    return transformers


def load_lm_eval(what: Any) -> Any:
    """lm-evaluation-harness. If it is not installed, raises ValueError that begins with `what`."""
    try:
        import lm_eval.api.group  # pyright: ignore[reportMissingImports]
        import lm_eval.api.task  # pyright: ignore[reportMissingImports]
        import lm_eval.evaluator  # pyright: ignore[reportMissingImports, reportUnusedImport]
        import lm_eval.tasks  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError as error:
        raise ValueError(f"{what}: needs lm-evaluation-harness: pip install 'fourbits[eval]'.") from error
    return lm_eval
