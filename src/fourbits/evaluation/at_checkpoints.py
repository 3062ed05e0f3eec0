"""Evaluates checkpoints while a run trains, as `fourbits eval CHECKPOINT` does; writes into the run folder.

The checkpoint is read into a separate BF16 model, so that the compiled code, graphs and random bits of the
model in training do not change. Every rank reads the whole model and does its share of the work.
"""

from collections.abc import Callable
from pathlib import Path

from fourbits.evaluation.evaluate_model import EvalOptions, evaluate_model
from fourbits.evaluation.evaluated_model import open_model
from fourbits.harness.results import add_results
from fourbits.harness.tasks import TaskOptions, load_tasks
from fourbits.train.config import TrainConfig
from fourbits.train.ranks.ranks import Ranks

#: the name in train.evaluate for loss and bits per byte of each source
TEXT = "text"


def checkpoint_evaluation(train: TrainConfig, ranks: Ranks) -> Callable[[Path], None] | None:
    """The function that `fourbits.train.run.run` calls with a checkpoint; None if train.evaluate is empty.

    Loads the tasks first, so that a wrong name or a missing dataset ends a run before it begins. Raises
    ValueError for the same reasons as `load_tasks`.
    """
    if not train.evaluate:
        return None
    names = [name for name in train.evaluate if name != TEXT]
    folder = None if train.evaluate_datasets is None else Path(train.evaluate_datasets)
    tasks = load_tasks(names, TaskOptions(datasets=folder)) if names else None
    options = EvalOptions(text=TEXT in train.evaluate)

    def evaluate(checkpoint: Path) -> None:
        model = open_model(checkpoint, ranks.device)
        found = evaluate_model(model, options, tasks, ranks, lambda *_: ranks.progress())
        if ranks.is_first:
            assert model.run is not None
            add_results(model.run.folder, model.run.step, found.precisions)

    return evaluate
