"""One process at a time prepares in a folder: runs that ask for the same text share one."""

import fcntl
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_NAME = ".preparing"


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Wait until no other process is inside for this folder, with a warning that says so.

    The system gives the lock back when a process ends, killed or not.
    """
    path = folder / _NAME
    with _ours(path):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _ours(path: Path) -> IO[bytes]:
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            warnings.warn(f"{path.parent}: waiting for another process that prepares it.", stacklevel=2)
            fcntl.flock(file, fcntl.LOCK_EX)
        # Whoever was inside has removed the file; a lock on it keeps nobody out any more.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()
