"""The runs of a comparison: every recipe with every seed, from one configuration, each in its own folder.

OUT/<recipe>/seed<k>   a run folder
OUT/data               the prepared text that all runs read
OUT/compare.json       the command, and the conditions under which each run executed
OUT/table.json, OUT/report.html, with several seeds OUT/gaps.svg
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fourbits.compare.published import PublishedCell
from fourbits.recipe.ablations import ablation_name, without
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe
from fourbits.train.config import RunConfig

BASELINE = "bf16"


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run of a comparison: its configuration, and the folder it is written to and read from.

    start_from, first_step: the checkpoint of the baseline's run that it continues, if it does, and its step.
    """

    recipe: str
    seed: int
    config: RunConfig
    folder: Path
    start_from: Path | None = None
    first_step: int = 0

    @property
    def key(self) -> str:
        """Its name within the comparison: recipe/seedK."""
        return f"{self.recipe}/seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Ablation:
    """A recipe, and the techniques to remove from it, one at a time."""

    recipe: str
    techniques: tuple[str, ...]

    @property
    def recipes(self) -> dict[str, str]:
        """Technique -> the name of the recipe without it."""
        return {technique: ablation_name(self.recipe, technique) for technique in self.techniques}


@dataclass(frozen=True, slots=True)
class RunMatrix:
    """All runs, in execution order. name: of the configuration; baseline: name of a recipe.

    ablation: the recipes derived from another by removing a technique, if any. published: results that were
    published for these settings, if any. fork_step: the step of the baseline after which the others start.
    """

    name: str
    out: Path
    baseline: str
    recipes: tuple[str, ...]
    seeds: tuple[int, ...]
    runs: tuple[RunSpec, ...]
    ablation: Ablation | None = None
    published: PublishedCell | None = None
    fork_step: int | None = None

    @property
    def data_cache(self) -> Path:
        """Where the text is prepared, once for all runs."""
        return self.out / "data"


def build_matrix(
    config: RunConfig,
    name: str,
    recipes: Sequence[str | Recipe],
    seeds: Sequence[int],
    out: Path,
    ablate: Sequence[str] = (),
    published: PublishedCell | None = None,
) -> RunMatrix:
    """The runs of a comparison. recipes: shipped names, YAML files or recipes. ablate: techniques to remove.

    Each technique is removed in a separate recipe from the only recipe besides bf16; bf16 is added as the
    baseline if it is missing.

    The baseline is bf16 if present, else the first recipe. All recipes of a seed run before the next seed
    begins, the baseline first, so that an interrupted comparison contains complete pairs. Raises ValueError
    for unknown or repeated recipes, techniques and seeds.
    """
    if config.train.time_limit is not None:
        raise ValueError(
            "train.time_limit: a comparison has none, as its runs end at their last step. "
            "Stop it with timeout -s TERM SECONDS and rerun it."
        )
    chosen = [get_recipe(recipe) for recipe in recipes]
    ablation = None
    if ablate:
        _check_distinct("--ablate", "technique", ablate)
        chosen, ablation = _ablated(chosen, ablate)
    names = [recipe.name for recipe in chosen]
    _check_distinct("--recipes", "recipe", names)
    _check_distinct("--seeds", "seed", [str(seed) for seed in seeds])
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
    ordered = tuple(recipe.name for recipe in chosen)
    return RunMatrix(name, out, baseline, ordered, tuple(seeds), tuple(runs), ablation, published)


def _ablated(chosen: Sequence[Recipe], techniques: Sequence[str]) -> tuple[list[Recipe], Ablation]:
    """bf16, the recipe to ablate, and that recipe without each technique."""
    full = [recipe for recipe in chosen if recipe.name != BASELINE]
    if len(full) != 1:
        raise ValueError(
            f"--ablate: removes techniques from one recipe, so --recipes must name one besides {BASELINE}, "
            f"got {', '.join(recipe.name for recipe in full) or 'none'}. Name one."
        )
    derived = [without(full[0], technique) for technique in techniques]
    baseline = [recipe for recipe in chosen if recipe.name == BASELINE] or [get_recipe(BASELINE)]
    return [*baseline, *full, *derived], Ablation(full[0].name, tuple(techniques))


def _check_distinct(option: str, kind: str, values: Sequence[str]) -> None:
    """Raises ValueError for no value and for a repeated one."""
    if not values:
        raise ValueError(f"{option}: must name at least one {kind}, got none. Name one.")
    for value in values:
        if list(values).count(value) > 1:
            raise ValueError(f"{option}: the {kind} {value} is repeated. Name it once.")
