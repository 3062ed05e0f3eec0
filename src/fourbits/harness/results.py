"""Results of evaluations in a run folder: evaluations/step_N.json, with a part for each precision.

A part has "text", the loss of each source and of all, and "tasks", the score of each task. A later evaluation
replaces the text and adds its tasks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourbits.data.whole_file import read_json, require, write_json

FOLDER = "evaluations"
_REMEDY = "Remove it and evaluate again."


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All results of one checkpoint. precisions: name -> its part, see above."""

    step: int
    precisions: dict[str, dict[str, Any]]


def add_results(run: Path, step: int, precisions: Mapping[str, Mapping[str, Any]]) -> Path:
    """Add results to those of a checkpoint; they replace earlier results of the same text and tasks.

    The file is written completely or not at all. Raises ValueError for a damaged file.
    """
    path = run / FOLDER / f"step_{step}.json"
    found = read_json(path, _REMEDY) if path.is_file() else {}
    kept: dict[str, Any] = found.get("precisions", {})
    for precision, parts in precisions.items():
        before = kept.get(precision, {})
        tasks = before.get("tasks", {}) | parts.get("tasks", {})
        kept[precision] = {**before, **parts} | ({"tasks": tasks} if tasks else {})
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"step": step, "precisions": kept})
    return path


def read_results(run: Path) -> list[Evaluation]:
    """The evaluations of a run, in the order of steps. Raises ValueError for a damaged file."""
    found: list[Evaluation] = []
    for path in (run / FOLDER).glob("step_*.json"):
        content = read_json(path, _REMEDY)
        require(content, {"step": int, "precisions": dict}, path, remedy="remove it and evaluate again")
        found.append(Evaluation(content["step"], content["precisions"]))
    return sorted(found, key=lambda each: each.step)
