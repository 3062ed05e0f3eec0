"""Loads tasks of lm-evaluation-harness, with their data, before a model, and runs them on the model."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fourbits.data.optional import load_lm_eval
from fourbits.harness import letters
from fourbits.harness.local_datasets import MissingDatasetError, from_folder
from fourbits.harness.quiet import quiet
from fourbits.harness.scoring import Report
from fourbits.harness.suites import NAMES, expanded
from fourbits.harness.text_model import TextModel
from fourbits.settings import nearest

#: seed of the draw of examples, as in the harness' own command
_EXAMPLES_SEED = 1234
_BOOTSTRAPS = 1000


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """How tasks are loaded.

    shots: examples in a prompt, instead of each task's; datasets: folder of copies of datasets, see
    local_datasets.py; include: folder of more task files in the harness' format; run_code: whether programs
    that the model writes may be executed.
    """

    shots: int | None = None
    datasets: Path | None = None
    include: Path | None = None
    run_code: bool = False

    def __post_init__(self) -> None:
        for name, folder in (("--datasets", self.datasets), ("--include", self.include)):
            if folder is not None and not folder.is_dir():
                raise ValueError(f"{name} {folder}: no such folder.")
        if self.shots is not None and self.shots < 0:
            raise ValueError(
                f"--shots: must be at least 0, got {self.shots}. Omit it for the number of each task."
            )


@dataclass(frozen=True, slots=True)
class Tasks:
    """Loaded tasks. loaded: in the harness' form; asked: (requested name, names of its results)."""

    loaded: Mapping[str, Any]
    asked: tuple[tuple[str, tuple[str, ...]], ...]


def load_tasks(names: Sequence[str], options: TaskOptions | None = None) -> Tasks:
    """Load tasks with their datasets. names: of the harness, of suites.py, or mmlu_pro_letters.

    Raises ValueError for an unknown name, a task that two names share, a missing dataset, and tasks that run
    programs without options.run_code.
    """
    options = options or TaskOptions()
    if not names or not all(names):
        raise ValueError("tasks: at least one is needed, such as mmlu_pro.")
    harness = load_lm_eval("tasks")
    if options.run_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    with quiet():
        manager = harness.tasks.TaskManager(include_path=options.include)
    requested = expanded(names)
    known = [*manager.all_tasks, letters.NAME, *NAMES]
    for name in requested:
        if name not in known:
            raise ValueError(
                f"tasks: no task is called {name!r}.{nearest(name, known, cutoff=0.7)} Names are those of "
                f"`lm_eval ls tasks`, {letters.NAME}, {', '.join(NAMES)}."
            )
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    asked: list[tuple[str, tuple[str, ...]]] = []
    for name, shots in requested.items():
        found = _loaded(manager, name, options)
        for task in found["tasks"].values():
            _set_up(task, shots if options.shots is None else options.shots)
        if again := found["tasks"].keys() & loaded["tasks"].keys():
            raise ValueError(f"tasks: {min(again)} is part of two of the given names. Remove one of them.")
        for part, content in loaded.items():
            content |= found.get(part, {})
        asked.append((name, (name,) if name in found["groups"] else tuple(found["tasks"])))
    return Tasks(loaded, tuple(asked))


def run_tasks(
    tasks: Tasks,
    text: TextModel,
    *,
    limit: int | None = None,
    report: Report | None = None,
    ranks: Any = None,
) -> dict[str, dict[str, Any]]:
    """Evaluate a model: the scores of every task and group as plain values; empty on ranks other than 0.

    limit: only the first questions of each task; for trials only. report, ranks: see HarnessModel.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit: must be at least 1, got {limit}. Omit it for all questions.")
    model = import_module("fourbits.harness.adapter").HarnessModel(text, report, ranks)
    if ranks is not None and ranks.rank:
        for task in tasks.loaded["tasks"].values():
            task.apply_filters = _leave
    found = None
    with quiet(), suppress(_AnsweredError):
        found = load_lm_eval("tasks").evaluator.evaluate(
            lm=model,
            task_dict=tasks.loaded,
            limit=limit,
            bootstrap_iters=_BOOTSTRAPS,
            log_samples=False,
            confirm_run_unsafe_code=True,  # load_tasks has checked it
        )
    if found is None:
        return {}
    scores = {name: _score(name, metrics, found) for name, metrics in found["results"].items()}
    scores |= {name: _score(name, metrics, found) for name, metrics in found.get("groups", {}).items()}
    for name, parts in tasks.asked:
        if name not in scores:
            scores[name] = _mean([scores[part] for part in parts])
    asked = {name for name, _ in tasks.asked}
    facts = {"limit": limit, "cut_prompts": model.cut_prompts, "harness": version("lm_eval")}
    return {name: {**each, "asked": name in asked, **facts} for name, each in scores.items()}


class _AnsweredError(Exception):
    """Called when all requests are answered."""


def _leave() -> None:
    """Keep a rank other than 0 from computing metrics, and from executing what the model wrote."""
    raise _AnsweredError


def _loaded(manager: Any, name: str, options: TaskOptions) -> dict[str, Any]:
    """The tasks and groups of a name. Raises ValueError."""
    try:
        with from_folder(options.datasets), quiet():
            found = manager.load([letters.letters_group() if name == letters.NAME else name])
    except MissingDatasetError as error:
        raise ValueError(f"{name}: {error}") from error
    except Exception as error:  # a task file may run arbitrary code
        raise ValueError(f"{name}: cannot be loaded: {type(error).__name__}: {error}") from error
    unsafe = [each for each, task in found["tasks"].items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe and not options.run_code:
        raise ValueError(
            f"{name}: executes programs that the model writes ({unsafe[0]}), with your rights. Pass "
            "--run-code to allow it, best in a container."
        )
    return found


def _set_up(task: Any, shots: int | None) -> None:
    own = task.get_config("num_fewshot")
    task.set_config(key="num_fewshot", value=(own or 0) if shots is None else shots)
    task.set_fewshot_seed(seed=_EXAMPLES_SEED)


def _score(name: str, metrics: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """A task's or group's metrics with their standard errors, its examples per prompt and its questions."""
    values = {
        key: float(value)
        for key, value in metrics.items()
        if isinstance(value, int | float) and not key.startswith(("sample_len", "sample_count"))
    }
    counts = _leaves(name, found["group_subtasks"])
    shots = sorted({found["n-shot"][task] for task in counts if task in found["n-shot"]})
    questions = sum(found["n-samples"][task]["effective"] for task in counts if task in found["n-samples"])
    return {"metrics": values, "shots": shots, "questions": questions}


def _leaves(name: str, parts: Mapping[str, Sequence[str]]) -> list[str]:
    below = parts.get(name) or []
    return [leaf for part in below for leaf in _leaves(part, parts)] if below else [name]


def _mean(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each metric that several tasks with one name share; each task has equal weight."""
    common = set.intersection(*(set(score["metrics"]) for score in scores))
    return {
        "metrics": {
            key: sum(score["metrics"][key] for score in scores) / len(scores)
            for key in sorted(common)
            if "_stderr" not in key
        },
        "shots": sorted({shot for score in scores for shot in score["shots"]}),
        "questions": sum(score["questions"] for score in scores),
    }
