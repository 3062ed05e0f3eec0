"""metrics.jsonl: a flushed line per step and per validation, equal for resumed and uninterrupted runs.

A line of kind "rollback" says that the run returned from "step" to the state after step "to": the lines of
later steps before it no longer count, and the same steps follow again. A line of kind "recompute_check"
belongs to the check for silent corruption before the step after "step".
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from fourbits.data.whole_file import close, flush, sync, write, write_whole

# Keys that depend on the machine's speed; all others are equal in an uninterrupted and in a resumed run.
MEASURED = ("tokens_per_second", "step_seconds", "data_seconds", "mfu", "memory_bytes")
ROLLBACK, RECOMPUTE_CHECK = "rollback", "recompute_check"
_KINDS = ("train", "validation", ROLLBACK, RECOMPUTE_CHECK)


class FolderChangedError(RuntimeError):
    """A run's files were removed, moved or replaced while it was running."""


class MetricsFile:
    """An open metrics.jsonl. Each line is a JSON object with "kind" (one of _KINDS) and "step"."""

    def __init__(
        self, path: Path, last_step: int, sha256: str | None = None, size: int | None = None
    ) -> None:
        """Open for appending after `last_step`; lines of later steps and an incomplete last line are removed.

        sha256, size: of the lines up to `last_step`, if known. Raises ValueError if they do not reach
        `last_step`, or if one was removed, repeated or changed: every trained step must have its line.
        """
        self.path = path
        #: steps in a row, up to `last_step`, that were skipped because values were not finite
        self.skipped_in_a_row = 0
        keep = reached = 0
        for number, (end, record) in enumerate(_lines_until(path, last_step, size), 1):
            if record["step"] != reached + (record["kind"] == "train"):
                raise ValueError(
                    f"{path}, line {number}: damaged: {record['kind']} of step {record['step']} follows step "
                    f"{reached}. Restore the file, or start again in another --out."
                )
            keep, reached = end, record["to"] if record["kind"] == ROLLBACK else record["step"]
            if record["kind"] in ("train", ROLLBACK):
                not_finite = record.get("skipped") and "spike_threshold" not in record
                self.skipped_in_a_row = self.skipped_in_a_row + 1 if not_finite else 0
        if reached != last_step:
            raise ValueError(
                f"{path}: damaged or truncated: its records end at step {reached}, but the run has a "
                f"checkpoint of step {last_step}. Restore the file, or start again in another --out."
            )
        self._digest = hashlib.sha256(_first_bytes(path, keep))
        if sha256 not in (None, self.sha256):
            raise ValueError(
                f"{path}: damaged: a line up to the checkpoint's step was changed, removed or added since it "
                "was saved. Restore the file, or start again in another --out."
            )
        #: size of all lines, in bytes
        self.size = keep
        self._file = path.open("ab")
        if self._file.tell() > keep:
            self._file.truncate(keep)
            self._file.seek(keep)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line and flush it. A number that JSON lacks (NaN, infinity) becomes null.

        Raises FolderChangedError if the file is no longer in its place, and OSError e.g. for a full disk.
        """
        self.require_in_place()
        plain = {key: _json_number(value) for key, value in record.items()}
        line = (json.dumps(plain, allow_nan=False) + "\n").encode()
        write(self._file, line)
        flush(self._file)
        self._digest.update(line)
        self.size += len(line)

    @property
    def sha256(self) -> str:
        """Hash of all lines."""
        return self._digest.hexdigest()

    def require_in_place(self) -> None:
        """Raises FolderChangedError if the path no longer names the open file."""
        try:
            in_place = os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise FolderChangedError(
                f"{self.path}: was moved, removed or replaced while the run was writing it. Put it back and "
                "rerun the command, or choose another --out."
            )

    def sync(self) -> None:
        """Write all lines to disk, as a checkpoint must not exist without the metrics of its steps."""
        self.require_in_place()
        sync(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        close(self._file)


class History(NamedTuple):
    """The complete records of a metrics.jsonl: those that count, those rolled back, and the rollbacks."""

    records: list[dict[str, Any]]
    discarded: list[dict[str, Any]]
    rollbacks: list[dict[str, Any]]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl that count. Raises ValueError for a damaged complete line."""
    return read_history(path).records


def read_history(path: Path) -> History:
    """All complete records of a metrics.jsonl. Raises ValueError for a damaged complete line."""
    found = History([], [], [])
    for number, (_, record) in enumerate(_complete_lines(path), 1):
        if record is None:
            raise ValueError(f"{path}, line {number}: damaged: not a metrics record. Remove the line.")
        if record["kind"] == ROLLBACK:
            found.rollbacks.append(record)
            found.discarded.extend(each for each in found.records if each["step"] > record["to"])
            found.records[:] = [each for each in found.records if each["step"] <= record["to"]]
        else:
            found.records.append(record)
    return found


def _first_bytes(path: Path, count: int) -> bytes:
    if not count:
        return b""
    with path.open("rb") as file:
        return file.read(count)


def copy_records(source: Path, target: Path, last_step: int, size: int | None = None) -> None:
    """Write the complete lines of `source` up to last_step to `target`. OSError for a full disk.

    size: of these lines, if known.
    """
    content = source.read_bytes() if source.is_file() else b""
    ends = [end for end, _ in _lines_until(source, last_step, size)]
    write_whole(target, content[: ends[-1] if ends else 0])


def _lines_until(path: Path, last_step: int, size: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """(offset of its end, record) of each line up to a step. size: of all of them, if known.

    Without it, as for checkpoints from before rollbacks, they end at the first line of a later step.
    """
    for end, record in _complete_lines(path) if path.is_file() else ():
        if record is None or (record["step"] > last_step if size is None else end > size):
            return
        yield end, record


def _complete_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(offset of the line's end, record or None if it is not one) of each line that ends in a newline."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield offset, _record(line)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict) or value.get("kind") not in _KINDS:
        return None
    if value["kind"] == ROLLBACK and not isinstance(value.get("to"), int):
        return None
    return value if isinstance(value.get("step"), int) else None


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
