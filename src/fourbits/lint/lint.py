"""lint: every finding about a run's configuration."""

from fourbits.lint.finding import Finding, LintedRun
from fourbits.lint.recipe_rules import RECIPE_RULES
from fourbits.lint.run_rules import RUN_RULES
from fourbits.train.config import RunConfig


def lint(config: RunConfig, gpus: int = 1, tensor: int = 1) -> list[Finding]:
    """The mistakes in a configuration, in the order of the rules; empty if there are none.

    gpus: number of GPUs of the run; tensor: number of tensor-parallel ranks for which shards are checked.
    Raises ValueError unless both are at least 1.
    """
    for name, value in (("gpus", gpus), ("tensor", tensor)):
        if value < 1:
            raise ValueError(f"lint: {name} must be at least 1, got {value}.")
    run = LintedRun.of(config, gpus, tensor)
    return [finding for rule in (*RECIPE_RULES, *RUN_RULES) for finding in rule(run)]
