"""Finished runs by recipe and seed; each run is paired with the baseline's run of the same seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fourbits.compare.published import PublishedCell
from fourbits.compare.report.curves import Curve, Line, Steps, common_steps, relative_gap, smooth
from fourbits.compare.report.runs import Run
from fourbits.compare.run.provenance import Provenance
from fourbits.compare.run.run_matrix import Ablation, RunMatrix
from fourbits.compare.statistics.interval import CONFIDENCE
from fourbits.compare.statistics.sequential import Stop

# Hashes in the manifest that must be equal for all recipes of a seed, or the runs are not comparable.
SHARED = ("initial_weights", "data_order", "validation")


@dataclass(frozen=True, slots=True)
class Comparison:
    """runs: by recipe, then by seed; the baseline has every seed that any recipe has.

    provenance: by recipe and seed; None for a run that was resumed. ablation: of recipes that lack one
    technique; stops: why recipes had no more seeds, empty where all recipes have all seeds. published:
    results that were published for the same settings. averaged: losses of averaged weights, by recipe and
    seed. fork_step: the step of the baseline's runs that the other recipes continue from.
    """

    name: str
    baseline: str
    runs: Mapping[str, Mapping[int, Run]]
    provenance: Mapping[tuple[str, int], Provenance | None]
    ablation: Ablation | None = None
    stops: Mapping[str, Stop] = field(default_factory=dict)
    published: PublishedCell | None = None
    averaged: Mapping[tuple[str, int], float] = field(default_factory=dict)
    fork_step: int | None = None

    @property
    def recipes(self) -> list[str]:
        """Names, in report order."""
        return list(self.runs)

    @property
    def seeds(self) -> list[int]:
        """Seeds, in order."""
        return list(self.runs[self.baseline])

    @property
    def any_run(self) -> Run:
        """The baseline's first run, for values that all runs share."""
        return self.runs[self.baseline][self.seeds[0]]

    def confidence(self, *recipes: str) -> float:
        """Confidence of a gap's interval: CONFIDENCE, or that of the look at which a recipe stopped."""
        stops = [self.stops[recipe] for recipe in recipes if recipe in self.stops]
        return min(stops, key=lambda stop: stop.seeds).confidence if stops else CONFIDENCE

    def check(self) -> None:
        """Raises ValueError if the recipes of a seed did not share initial weights and data."""
        for seed in self.seeds:
            expected = shared_hashes(self.runs[self.baseline][seed])
            for runs in self.runs.values():
                if seed not in runs:
                    continue
                found = shared_hashes(runs[seed])
                for name in SHARED:
                    if found[name] != expected[name]:
                        raise ValueError(
                            f"{runs[seed].path}: {name.replace('_', ' ')} must match {self.baseline} with "
                            f"seed {seed}, but the hashes differ. Delete this folder and rerun the command."
                        )

    def speed(self, recipe: str, seed: int) -> float:
        """Tokens/s of the median step; only steps under full load count, if there are enough of them."""
        run, provenance = self.runs[recipe][seed], self.provenance[recipe, seed]
        return run.median_speed(provenance.together if provenance and provenance.has_speed else None)

    def validation_line(self, recipe: str) -> Line:
        """Validation loss over tokens, mean and range over seeds."""
        runs = list(self.runs[recipe].values())
        steps = common_steps([run.validation_steps for run in runs])
        return self._line(recipe, steps, np.stack([run.validation_loss(steps) for run in runs]))

    def train_line(self, recipe: str) -> Line:
        """Smoothed training loss over tokens, mean and range over seeds."""
        runs = list(self.runs[recipe].values())
        steps = common_steps([run.train_steps for run in runs])
        return self._line(recipe, steps, np.stack([smooth(run.train["loss"])[: len(steps)] for run in runs]))

    def gap_line(self, recipe: str) -> Line:
        """Relative gap of the validation loss to the baseline [%] over tokens; seeds are paired."""
        steps = common_steps([run.validation_steps for pair in self._pairs(recipe) for run in pair])
        gaps = [
            relative_gap(run.validation_loss(steps), base.validation_loss(steps))
            for run, base in self._pairs(recipe)
        ]
        return self._line(recipe, steps, np.stack(gaps))

    def train_gap_line(self, recipe: str) -> Line:
        """Relative gap of the smoothed training loss [%], on the same batches."""
        steps = common_steps([run.train_steps for pair in self._pairs(recipe) for run in pair])
        size = len(steps)
        gaps = [
            relative_gap(smooth(run.train["loss"][:size]), smooth(base.train["loss"][:size]))
            for run, base in self._pairs(recipe)
        ]
        return self._line(recipe, steps, np.stack(gaps))

    def _pairs(self, recipe: str) -> list[tuple[Run, Run]]:
        """Each run of a recipe with the baseline's run of the same seed."""
        return [(run, self.runs[self.baseline][seed]) for seed, run in self.runs[recipe].items()]

    def _line(self, recipe: str, steps: Steps, values: Curve) -> Line:
        """values: [seeds, n]."""
        several = len(values) > 1
        return Line(
            recipe,
            self.recipes.index(recipe),
            self.any_run.tokens_at(steps),
            values.mean(axis=0),
            values.min(axis=0) if several else None,
            values.max(axis=0) if several else None,
        )


def read_comparison(
    matrix: RunMatrix,
    provenance: Mapping[str, Provenance | None],
    ran: Mapping[str, Sequence[int]] | None = None,
    stops: Mapping[str, Stop] | None = None,
) -> Comparison:
    """Read the runs of a matrix. ValueError if they are not comparable.

    provenance: by key of the run; ran: the seeds of each recipe that count, None for all; stops: why recipes
    stopped.
    """
    runs = {
        recipe: {
            spec.seed: Run.read(spec.folder)
            for spec in matrix.runs
            if spec.recipe == recipe and (ran is None or spec.seed in ran[recipe])
        }
        for recipe in matrix.recipes
    }
    by_run = {(spec.recipe, spec.seed): provenance.get(spec.key) for spec in matrix.runs}
    comparison = Comparison(
        matrix.name,
        matrix.baseline,
        runs,
        by_run,
        matrix.ablation,
        stops or {},
        matrix.published,
        fork_step=matrix.fork_step,
    )
    comparison.check()
    return comparison


def shared_hashes(run: Run) -> dict[str, Any]:
    """Hashes that must be equal for all recipes of a seed."""
    return {name: run.manifest["hashes"][name] for name in SHARED}
