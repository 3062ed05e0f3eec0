"""Small files that appear whole or not at all, and errors of writing that say which file they are about."""

import errno
import hashlib
import json
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to disk, and rename it. OSError for a full disk."""
    temporary = path.with_name(path.name + ".tmp")
    with written(temporary) as file:
        write(file, content)
    temporary.replace(path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write plain values as indented JSON, whole or not at all."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path, remedy: str = "Remove it and give the command again.") -> dict[str, Any]:
    """What `write_json` wrote. Raises ValueError naming a file that is damaged, and what to do about it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}. {remedy}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(value).__name__}. {remedy}")
    return value


def file_sha256(path: Path) -> str:
    """SHA-256 of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def written(path: Path) -> Generator[BinaryIO]:
    """A file to `write` to, which is on disk when the block ends. OSError naming it, for a full disk say."""
    file = path.open("wb")
    try:
        yield file
        sync(file)
    finally:
        close(file)


def close(file: BinaryIO) -> None:
    """Close a file that is on disk, or that could not be written."""
    # A full disk fails once more when close() flushes; the first error is the one to be seen.
    with suppress(OSError):
        file.close()


def write(file: BinaryIO, content: bytes) -> None:
    """Write to an open file. OSError naming it, for a full disk say."""
    try:
        file.write(content)
    except OSError as error:
        raise _naming(error, file) from error


def sync(file: BinaryIO) -> None:
    """Bring a file's content to disk. OSError naming it, for a full disk say."""
    try:
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise _naming(error, file) from error


def _naming(error: OSError, file: BinaryIO) -> OSError:
    """The system's error with its file and, of a full disk, with what to do."""
    remedy = ". Make room and give the command again" if error.errno in _FULL else ""
    return OSError(error.errno, f"{error.strerror}{remedy}", file.name)
