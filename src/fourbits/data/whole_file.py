"""Writes files that appear complete or not at all, and names the file in every error."""

import errno
import hashlib
import json
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

_AGAIN = "prepare the data again"
_JSON_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "text", int: "a whole number"}
FREE_SPACE = "Free some space and rerun the command"
#: what to do about an error of the system, by its number
_REMEDIES = {
    errno.ENOSPC: FREE_SPACE,
    errno.EDQUOT: FREE_SPACE,
    errno.ENOENT: "Correct the path, or create what it names",
    errno.EACCES: "Change its permissions, or pass another path",
    errno.EPERM: "Change its permissions, or pass another path",
    errno.EROFS: "Pass a path on a disk that can be written",
    errno.EISDIR: "Pass a file in place of the folder",
    errno.ENOTDIR: "Correct the path: only its last part may be a file",
    errno.EEXIST: "Pass a path that does not exist yet, or delete what is there",
    errno.ENAMETOOLONG: "Pass a shorter name",
    errno.ELOOP: "Replace the links, which point to each other, or pass another path",
    errno.EMFILE: "Raise the number of files that a process may open, as with `ulimit -n 4096`",
}


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to disk, and rename it. OSError for a full disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open_synced(temporary) as file:
            write(file, content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write plain values as indented JSON; the file appears complete or not at all."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path, remedy: str = "Delete it and rerun the command.") -> dict[str, Any]:
    """Read a JSON object. Raises ValueError with the file and the remedy if it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged: {error}. {remedy}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(value).__name__}. {remedy}")
    return value


def require(
    value: Mapping[str, Any], types: Mapping[str, type], path: Path, place: str = "", remedy: str = ""
) -> None:
    """Raises ValueError that names a key of `place` in a file unless every key exists with its type."""
    for key, kind in types.items():
        where = f"{place}.{key}" if place else key
        if key not in value:
            raise ValueError(f"{path}: damaged: {where!r} is missing; {remedy or _AGAIN}.")
        if not isinstance(value[key], kind) or (kind is int and isinstance(value[key], bool)):
            rule = f"{where!r} must be {_JSON_NAMES[kind]}, got {value[key]!r}"
            raise ValueError(f"{path}: damaged: {rule}; {remedy or _AGAIN}.")


def is_source_name(name: str) -> bool:
    """Whether a source's name can be a file name: it is printable and does not contain a folder."""
    return name.isprintable() and name == Path(name).name and bool(name.strip("."))


def file_sha256(path: Path) -> str:
    """SHA-256 of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def open_synced(path: Path) -> Generator[BinaryIO]:
    """Open a file to `write` to; it is flushed to disk at the end of the block. OSError has its name."""
    file = path.open("wb")
    try:
        yield file
        sync(file)
    finally:
        close(file)


def close(file: BinaryIO) -> None:
    """Close a file that was flushed to disk or has failed; errors are ignored."""
    # On a full disk close() fails again when it flushes; the user should see the first error.
    with suppress(OSError):
        file.close()


def write(file: BinaryIO, content: bytes | memoryview) -> None:
    """Write to an open file. Raises OSError with the file's name, for example for a full disk."""
    try:
        file.write(content)
    except OSError as error:
        raise _with_name(error, file) from error


def flush(file: BinaryIO) -> None:
    """Flush an open file's buffer to the system. Raises OSError with the file's name."""
    try:
        file.flush()
    except OSError as error:
        raise _with_name(error, file) from error


def library_error(error: Exception, path: Path) -> OSError:
    """The OSError in a library's own error, whose text has the system's number: "... (os error 28)"."""
    number = re.search(r"os error (\d+)", str(error))
    code = int(number[1]) if number else errno.EIO
    reason = os.strerror(code) if number else str(error)
    return OSError(code, f"{reason}{system_remedy(code)}", str(path))


def system_remedy(code: int | None) -> str:
    """ ". " and what to do about an OSError of this number; empty if nothing is known to help."""
    return f". {_REMEDIES[code]}" if code in _REMEDIES else ""


def sync(file: BinaryIO) -> None:
    """Flush a file to disk. Raises OSError with the file's name, for example for a full disk."""
    try:
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise _with_name(error, file) from error


def sync_path(path: Path) -> None:
    """Wait until a closed file, or the names in a folder, are on disk. Windows cannot wait for a folder."""
    posix = os.name == "posix"
    if not posix and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if posix else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _with_name(error: OSError, file: BinaryIO) -> OSError:
    """The system's error with the file's name and, for a full disk, the remedy."""
    return OSError(error.errno, f"{error.strerror}{system_remedy(error.errno)}", file.name)
