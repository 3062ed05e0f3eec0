"""The runs of a comparison: every recipe with every seed, from one configuration, each in its own folder.

OUT/<recipe>/seed<k>   a run folder
OUT/data               the prepared text that all runs read
OUT/compare.json       the command, and the conditions under which each run executed
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
class RunSpec:
    """One run of a comparison: its configuration, and the folder it is written to and read from."""

    recipe: str
    seed: int
    config: RunConfig
    folder: Path

    @property
    def key(self) -> str:
        """Its name within the comparison: recipe/seedK."""
        return f"{self.recipe}/seed{self.seed}"


@dataclass(frozen=True, slots=True)
class RunMatrix:
    """All runs, in execution order. name: of the configuration; baseline: name of a recipe."""

    name: str
    out: Path
    baseline: str
    recipes: tuple[str, ...]
    seeds: tuple[int, ...]
    runs: tuple[RunSpec, ...]

    @property
    def data_cache(self) -> Path:
        """Where the text is prepared, once for all runs."""
        return self.out / "data"


def build_matrix(
    config: RunConfig, name: str, recipes: Sequence[str], seeds: Sequence[int], out: Path
) -> RunMatrix:
    """The runs of a comparison. recipes: shipped names or YAML files.

    The baseline is bf16 if present, else the first recipe. All recipes of a seed run before the next seed
    begins, the baseline first, so that an interrupted comparison contains complete pairs. Raises ValueError
    for unknown or repeated recipes and repeated seeds.
    """
    if config.train.time_limit is not None:
        raise ValueError(
            "train.time_limit: a comparison has none, as its runs end at their last step. "
            "Stop it with timeout -s TERM SECONDS and rerun it."
        )
    chosen = [get_recipe(recipe) for recipe in recipes]
    names = [recipe.name for recipe in chosen]
    _check_distinct("recipe", names)
    _check_distinct("seed", [str(seed) for seed in seeds])
    for recipe in names:
        if not re.fullmatch(r"[\w.+-]*\w", recipe):
            raise ValueError(
                f"recipe {recipe!r}: the name becomes a folder, so it must consist of letters, digits and "
                "._+-. Rename the recipe."
            )
    baseline = BASELINE if BASELINE in names else names[0]
    chosen.sort(key=lambda recipe: recipe.name != baseline)
    runs = [
        RunSpec(
            recipe.name,
            seed,
            replace(config, recipe=recipe, train=replace(config.train, seed=seed)),
            out / recipe.name / f"seed{seed}",
        )
        for seed in seeds
        for recipe in chosen
    ]
    return RunMatrix(name, out, baseline, tuple(recipe.name for recipe in chosen), tuple(seeds), tuple(runs))


def _check_distinct(kind: str, values: Sequence[str]) -> None:
    """Raises ValueError for no value and for a repeated one."""
    if not values:
        raise ValueError(f"--{kind}s: must name at least one {kind}, got none. Name one.")
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"--{kind}s: the {kind} {value} is repeated. Name it once.")
