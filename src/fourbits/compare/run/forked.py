"""A comparison whose recipes continue the baseline's runs, in place of training from the beginning.

Two runs that differ in one bit end as far apart as two seeds, because training amplifies differences from its
first steps on. Runs that share all but their last steps lack the time for it: from seed to seed, the gaps of
the last fifth of a run differ by 0.0005, those of whole runs by 0.01 (docs/results.md).
"""

from collections.abc import Sequence
from dataclasses import replace

from fourbits.compare.run.run_matrix import RunMatrix, RunSpec
from fourbits.train.config import RunConfig


def forked(matrix: RunMatrix, share: float) -> RunMatrix:
    """The matrix whose other recipes start from the baseline's checkpoint after this share of its steps.

    Raises ValueError for a share that leaves no step before or after it, and for a baseline alone.
    """
    num_steps = matrix.runs[0].config.train.num_steps
    step = round(share * num_steps) if 0 < share < 1 else 0
    if not 0 < step < num_steps:
        raise ValueError(
            f"--fork-after: must leave steps before and after the fork, got {share:g} of {num_steps} steps. "
            "Pass a share between 0 and 1, such as 0.8."
        )
    if len(matrix.recipes) < 2:
        raise ValueError(
            f"--fork-after: needs a recipe that continues the baseline's runs, got {matrix.baseline} alone. "
            "Extend --recipes."
        )
    base = {
        run.seed: run.folder / "checkpoints" / f"step_{step}" for run in matrix.runs if _is_base(matrix, run)
    }
    runs = [
        replace(
            run,
            config=_keeping(run.config, step),
            start_from=None if _is_base(matrix, run) else base[run.seed],
            first_step=0 if _is_base(matrix, run) else step,
        )
        for run in matrix.runs
    ]
    return replace(matrix, runs=tuple(runs), fork_step=step)


def fork_rounds(matrix: RunMatrix) -> Sequence[Sequence[int]] | None:
    """The rounds of `execute_runs`: the baseline's runs before those that continue them; None without."""
    if matrix.fork_step is None:
        return None
    first = [number for number, run in enumerate(matrix.runs) if run.start_from is None]
    return first, [number for number in range(len(matrix.runs)) if number not in first]


def _is_base(matrix: RunMatrix, run: RunSpec) -> bool:
    return run.recipe == matrix.baseline


def _keeping(config: RunConfig, step: int) -> RunConfig:
    """The settings of a run that saves the checkpoint of this step and keeps it."""
    interval = config.train.checkpoint_interval
    if interval is None or step % interval:
        interval = step
    return replace(config, train=replace(config.train, checkpoint_interval=interval, keep_every=step))
