"""What a comparison runs: every recipe with every seed, from one configuration, each in a folder of its own.

OUT/<recipe>/seed<k>   a run folder
OUT/data               the prepared text that all of them read
OUT/compare.json       what was asked, and how each run was made
OUT/table.json, OUT/report.html
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fourbits.recipe.presets import get_recipe
from fourbits.train.config import RunConfig

BASELINE = "bf16"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a comparison. folder: where it runs, and also where it is found again."""

    recipe: str
    seed: int
    config: RunConfig
    folder: Path

    @property
    def key(self) -> str:
        """Its name within the comparison: recipe/seedK."""
        return f"{self.recipe}/seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Plan:
    """All runs, in the order in which they are made. name: of the configuration; baseline: a recipe."""

    name: str
    out: Path
    baseline: str
    recipes: tuple[str, ...]
    seeds: tuple[int, ...]
    runs: tuple[PlannedRun, ...]

    @property
    def data_cache(self) -> Path:
        """Where text is prepared, once for all runs."""
        return self.out / "data"


def make_plan(config: RunConfig, name: str, recipes: Sequence[str], seeds: Sequence[int], out: Path) -> Plan:
    """Plan a comparison. recipes: shipped names or YAML files; baseline: bf16 if present, else the first.

    A seed is finished for all recipes before the next begins, the baseline first, so that an interrupted
    comparison has whole pairs. Raises ValueError for unknown or repeated recipes and repeated seeds.
    """
    chosen = [get_recipe(recipe) for recipe in recipes]
    names = [recipe.name for recipe in chosen]
    for what, values in (("recipe", names), ("seed", [str(seed) for seed in seeds])):
        if not values:
            raise ValueError(f"compare: needs at least one {what}. Name it in --{what}s.")
        for value in values:
            if values.count(value) > 1:
                raise ValueError(f"compare: the {what} {value} was given twice. Name it once.")
    for recipe in names:
        if not re.fullmatch(r"[\w.+-]*\w", recipe):
            raise ValueError(
                f"compare: a recipe's name becomes a folder's, so it must be letters, digits and . + - _, "
                f"got {recipe!r}. Give the recipe another name."
            )
    baseline = BASELINE if BASELINE in names else names[0]
    chosen.sort(key=lambda recipe: recipe.name != baseline)
    runs = [
        PlannedRun(
            recipe.name,
            seed,
            replace(config, recipe=recipe, train=replace(config.train, seed=seed)),
            out / recipe.name / f"seed{seed}",
        )
        for seed in seeds
        for recipe in chosen
    ]
    return Plan(name, out, baseline, tuple(recipe.name for recipe in chosen), tuple(seeds), tuple(runs))
