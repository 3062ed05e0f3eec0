"""summary.json: a run in a few numbers, computed from its metrics."""

import statistics
from itertools import takewhile
from pathlib import Path
from typing import Any

from fourbits.train.metrics import RECOMPUTE_CHECK, History, read_history

Summary = dict[str, Any]


def summarize(
    metrics: Path, ended: str, reason: str | None, last_good: Path | None = None, first_step: int = 0
) -> Summary:
    """The content of summary.json, from the metrics file, so that it covers all parts of a resumed run.

    last_good: of a run that ended non-finite, the checkpoint to continue from; first_step: the steps of the
    run that this one continues, whose speed is not its own.
    """
    history = read_history(metrics) if metrics.is_file() else History([], [], [])
    records = history.records
    trained = [record for record in (*history.discarded, *records) if record["kind"] == "train"]
    steps = [record for record in records if record["kind"] == "train"]
    validations = [record for record in records if record["kind"] == "validation"]
    losses = [record["loss"] for record in steps if record["loss"] is not None]
    checks = [record for record in (*history.discarded, *records) if record["kind"] == RECOMPUTE_CHECK]
    speeds = [record["tokens_per_second"] for record in steps if record["step"] > first_step]
    tail = losses[-max(1, len(losses) // 20) :]
    return {
        "ended": ended,
        "reason": reason,
        "steps": steps[-1]["step"] if steps else 0,
        "tokens": steps[-1]["tokens"] if steps else 0,
        "train_loss": statistics.fmean(tail) if tail else None,
        **(
            {k: v for k, v in validations[-1].items() if k.startswith("val_")}
            if validations
            else {"val_loss": None}
        ),
        "skipped_steps": sum(record["skipped"] for record in steps),
        "skipped_in_a_row": len(list(takewhile(_not_finite, reversed(steps)))),
        "spikes": sum("spike_threshold" in record for record in steps),
        "rollbacks": len(history.rollbacks),
        "rolled_back_steps": len(trained) - len(steps),
        "recompute_checks": len(checks),
        "recompute_mismatches": sum(not record["equal"] for record in checks),
        "phases": _phases(steps),
        "last_good_checkpoint": last_good and last_good.name,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "seconds": sum(record["step_seconds"] for record in trained),
        "peak_memory_bytes": max((record["memory_bytes"] for record in trained), default=None),
    }


def _phases(steps: list[dict[str, Any]]) -> dict[str, int]:
    """The phases of the precision schedule that the run entered, with their first steps."""
    found: dict[str, int] = {}
    for record in steps:
        for name in filter(None, record.get("phase", "").split(", ")):
            found.setdefault(name, record["step"])
    return found


def _not_finite(record: dict[str, Any]) -> bool:
    return record["skipped"] and "spike_threshold" not in record
