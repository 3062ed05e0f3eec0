"""lint: every finding about a run's configuration."""

from fourbits.lint.finding import Finding, LintedRun
from fourbits.lint.recipe_rules import RECIPE_RULES
from fourbits.lint.run_rules import RUN_RULES
from fourbits.plan.gpus import require_count
from fourbits.train.config import RunConfig


def lint(config: RunConfig, gpus: int | None = None, tensor: int = 1) -> list[Finding]:
    """The mistakes in a configuration, in the order of the rules; empty if there are none.

    tensor: number of tensor-parallel ranks for which shards are checked; gpus: number of GPUs of the run, by
    default as many. Raises ValueError for numbers that no run has.
    """
    require_count("lint: tensor", tensor)
    gpus = tensor if gpus is None else gpus
    require_count("lint: gpus", gpus)
    if gpus % tensor:
        raise ValueError(
            f"lint: tensor: must divide the number of GPUs, {gpus}, got {tensor}. Pass another number of "
            "either."
        )
    run = LintedRun.of(config, gpus, tensor)
    return [finding for rule in (*RECIPE_RULES, *RUN_RULES) for finding in rule(run)]
