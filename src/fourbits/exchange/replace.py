"""Replaces several files of a folder together; no reader, error or kill sees or leaves a mix of two sets.

The new files are written into a folder inside it and flushed to disk. Then the old files are moved into that
folder, the `last` one first, and the new files out of it, the `last` one last. Until that last move
everything can be undone: immediately after an error, by the next call after a kill. The old files are removed
at the end. A folder whose `last` file is missing counts as empty; the file is missing during a few renames.
"""

import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fourbits.data.whole_file import read_json, sync_path, write_json

STAGING = ".incomplete-export"
NEW, OLD, MOVES = "new", "old", "moves.json"


@contextmanager
def replaced_together(folder: Path, last: str, stale: Iterable[str]) -> Generator[Path]:
    """Yield an empty folder for the new files; at the end of the block they replace the old ones.

    last: the file without which the folder counts as empty; stale: patterns of old files to remove even if no
    new file has their name. Raises OSError, e.g. for a full disk, and leaves the old files unchanged;
    ValueError if another process is writing here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        _settle(folder, last)
        (folder / STAGING / NEW).mkdir(parents=True)
        (folder / STAGING / OLD).mkdir()
        try:
            yield folder / STAGING / NEW
            _commit(folder, last, stale)
        finally:
            _settle(folder, last)


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    path = folder / f"{STAGING}.lock"
    try:
        with FileLock(path, timeout=0):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    except Timeout as error:
        raise ValueError(f"{folder}: another process is exporting into it. Wait for it to end.") from error


def interrupted(folder: Path, last: str) -> bool:
    """Whether a replacement was killed between its first and its last move."""
    return (folder / STAGING / MOVES).is_file() and (folder / STAGING / NEW / last).is_file()


def _commit(folder: Path, last: str, stale: Iterable[str]) -> None:
    staging = folder / STAGING
    arriving = sorted(file.name for file in (staging / NEW).iterdir() if file.name != last)
    for name in (*arriving, last):
        sync_path(staging / NEW / name)
    sync_path(staging / NEW)
    old = {file.name for pattern in (*arriving, *stale) for file in folder.glob(pattern)}
    leaving = [name for name in (last, *sorted(old - {last})) if (folder / name).exists()]
    write_json(staging / MOVES, {"leaving": leaving, "arriving": arriving})
    for name in leaving:
        (folder / name).replace(staging / OLD / name)
    for name in (*arriving, last):
        (staging / NEW / name).replace(folder / name)
    sync_path(folder)


def _settle(folder: Path, last: str) -> None:
    """Undo the moves of an unfinished replacement, and remove the files that any replacement left."""
    staging = folder / STAGING
    if interrupted(folder, last):
        moves = read_json(staging / MOVES)
        for name in moves["arriving"]:
            if not (staging / NEW / name).exists():
                (folder / name).replace(staging / NEW / name)
        for name in reversed(moves["leaving"]):
            if (staging / OLD / name).exists():
                (staging / OLD / name).replace(folder / name)
        (staging / MOVES).unlink()  # removed first: an incomplete rest would look like moves to undo
    if staging.exists():
        shutil.rmtree(staging)
