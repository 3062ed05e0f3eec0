"""Checks that a file can be written before a command computes what belongs in it."""

import os
from pathlib import Path


def require_output(option: str, path: Path, example: str) -> None:
    """Raises ValueError, with an example, unless a file can be written at a path."""
    wrong = None
    if path.is_dir():
        wrong = f"{path} is a folder"
    elif not path.parent.is_dir():
        wrong = f"the folder {path.parent} does not exist"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        wrong = f"{path} is not writable"
    if wrong is not None:
        raise ValueError(
            f"{option}: must be a file in an existing folder, got {str(path)!r}: {wrong}. Pass one such as "
            f"{example}."
        )
