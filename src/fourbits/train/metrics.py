"""metrics.jsonl: a flushed line per step and per validation, equal for resumed and unbroken runs."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

# Keys that say how fast the machine was; all others are equal in an unbroken and in a resumed run.
MEASURED = ("tokens_per_second", "step_seconds", "data_seconds", "mfu", "memory_bytes")


class MetricsFile:
    """The open metrics of a run. Each line is a JSON object with "kind" (train or validation) and "step"."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Open for appending after `last_step`; lines of later steps, or unfinished ones, are cut off.

        Raises ValueError if the lines do not reach `last_step`: a step that was trained has its line.
        """
        self.path = path
        keep = reached = 0
        for end, record in _complete_lines(path) if path.is_file() else ():
            if record is None or record["step"] > last_step:
                break
            keep, reached = end, record["step"]
        if reached != last_step:
            raise ValueError(
                f"{path}: damaged or cut: its records end at step {reached}, but the run has a checkpoint of "
                f"step {last_step}. Restore the file, or begin anew in another --out."
            )
        self._file = path.open("ab")
        if self._file.tell() > keep:
            self._file.truncate(keep)
            self._file.seek(keep)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line now. A number that JSON lacks (NaN, infinity) becomes null."""
        plain = {key: _json_number(value) for key, value in record.items()}
        self._file.write((json.dumps(plain, allow_nan=False) + "\n").encode())
        self._file.flush()

    def sync(self) -> None:
        """Make all lines durable; a checkpoint of a step must not outlive its metrics."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete records of a metrics.jsonl. Raises ValueError for a damaged line before the end."""
    records: list[dict[str, Any]] = []
    lines = list(_complete_lines(path))
    for number, (_, record) in enumerate(lines, 1):
        if record is None:
            raise ValueError(f"{path}, line {number}: damaged, not a metrics record. Remove the line.")
        records.append(record)
    return records


def _complete_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(offset of the line's end, record or None if it is none) of each line that was written to its end."""
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
    if not isinstance(value, dict) or value.get("kind") not in ("train", "validation"):
        return None
    return value if isinstance(value.get("step"), int) else None


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
