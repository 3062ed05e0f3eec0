"""health.jsonl: a line per sample of the layers' health, and the messages about its alarms."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fourbits.data.whole_file import write_whole
from fourbits.linear.monitor.health import HealthReport, Sampling

#: an alarm is over after this many samples in a row without it, since shares cross a threshold back and forth
OVER_AFTER = 3


class HealthLog:
    """The samples of a run, in its folder. A disk error does not end the run."""

    def __init__(self, path: Path, last_step: int, notify: Callable[[str], None]) -> None:
        """Continue after `last_step`; lines of later steps, which will be sampled again, are removed."""
        self._path, self._notify, self._failed = path, notify, False
        self._last: HealthReport | None = None
        #: by alarm that is not over, the samples in a row that did not raise it
        self._raised: dict[str, int] = {}
        if path.is_file():
            kept = [
                line for line in path.read_text(encoding="utf-8").splitlines() if _step(line) <= last_step
            ]
            write_whole(path, "".join(f"{line}\n" for line in kept).encode())

    def take(self, sample: Sampling, step: int) -> dict[str, float]:
        """Write a sample, report which alarms begin and end, and return its numbers for metrics.jsonl."""
        self._last = report = sample.report(self._last)
        for alarm in report.alarms:
            if alarm.kind not in self._raised:
                self._notify(f"step {step}: health: {alarm.kind}: {alarm.text}")
        raised = {alarm.kind: 0 for alarm in report.alarms}
        silent = {kind: count + 1 for kind, count in self._raised.items() if kind not in raised}
        for kind in sorted(kind for kind, count in silent.items() if count == OVER_AFTER):
            self._notify(f"step {step}: health: {kind}: over")
        self._raised = raised | {kind: count for kind, count in silent.items() if count < OVER_AFTER}
        self._append(json.dumps({"step": step, **report.to_dict()}))
        return report.numbers()

    def _append(self, line: str) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._notify(f"{self._path}: {error.strerror}. The run continues without it.")


def read_health(path: Path) -> list[dict[str, Any]]:
    """The samples of a run, in order; an incomplete last line is ignored."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _step(line: str) -> float:
    """The step of a line; infinite for one that is damaged, as after a kill."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
