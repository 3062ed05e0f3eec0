"""Scores of tasks as the rows of a table, for the terminal and for reports."""

from collections.abc import Mapping
from typing import Any

from fourbits.harness.suites import PAPER_RESULTS

#: precision -> its part of the results, see results.py
Precisions = Mapping[str, Mapping[str, Any]]


def score_rows(precisions: Precisions) -> list[dict[str, Any]]:
    """A row for each metric of each requested task, with the values of all precisions as text.

    paper: the paper's results in per cent, (FP8, NVFP4), or None.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for precision, part in precisions.items():
        for task, score in part.get("tasks", {}).items():
            for metric, value in score["metrics"].items() if score["asked"] else ():
                name, _, how = metric.partition(",")
                if name.endswith("_stderr"):
                    continue
                row = rows.setdefault(
                    (task, metric),
                    {
                        "task": task,
                        "metric": name if how == "none" else f"{name} ({how})",
                        "shots": ", ".join(map(str, score["shots"])),
                        "questions": score["questions"],
                        "values": {},
                        "paper": PAPER_RESULTS.get((task, metric)),
                    },
                )
                error = score["metrics"].get(f"{name}_stderr,{how}")
                row["values"][precision] = f"{value:.4f}" + (f" +- {error:.4f}" if error else "")
    return list(rows.values())
