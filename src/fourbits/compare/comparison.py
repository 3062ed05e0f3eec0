"""Finished runs side by side: recipes by seeds, paired by seed with the baseline."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fourbits.compare.figures import Line
from fourbits.compare.made import Made
from fourbits.compare.runs import Run
from fourbits.compare.smooth import Curve, Steps, common_steps, relative_gap, smooth

# In every seed these must be the same for all recipes, or the runs are no comparison.
SHARED = ("initial_weights", "data_order", "validation")


@dataclass(frozen=True, slots=True)
class Comparison:
    """runs: by recipe, then by seed. made: how each was made, None if in parts."""

    name: str
    baseline: str
    runs: Mapping[str, Mapping[int, Run]]
    made: Mapping[tuple[str, int], Made | None]

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
        """The baseline's first run, for facts that all runs share."""
        return self.runs[self.baseline][self.seeds[0]]

    def check(self) -> None:
        """Raises ValueError if the recipes of a seed did not start and read alike."""
        for seed in self.seeds:
            expected = shared_facts(self.runs[self.baseline][seed])
            for runs in self.runs.values():
                found = shared_facts(runs[seed])
                for fact in SHARED:
                    if found[fact] != expected[fact]:
                        raise ValueError(
                            f"{runs[seed].path}: its {fact.replace('_', ' ')} must be that of "
                            f"{self.baseline} with seed {seed}, but the hashes differ. Run it anew."
                        )

    def speed(self, recipe: str, seed: int) -> float:
        """Tokens/s of the median step, of those made beside as many runs as ever, if they are enough."""
        run, made = self.runs[recipe][seed], self.made[recipe, seed]
        return run.median_speed(made.together if made and made.has_speed else None)

    def validation_line(self, recipe: str) -> Line:
        """Validation loss against tokens, mean and range over seeds."""
        runs = list(self.runs[recipe].values())
        steps = common_steps([run.validation_steps for run in runs])
        return self._line(recipe, steps, np.stack([run.validation_loss(steps) for run in runs]))

    def train_line(self, recipe: str) -> Line:
        """Smoothed training loss against tokens, mean and range over seeds."""
        runs = list(self.runs[recipe].values())
        steps = common_steps([run.train_steps for run in runs])
        return self._line(recipe, steps, np.stack([smooth(run.train["loss"])[: len(steps)] for run in runs]))

    def gap_line(self, recipe: str) -> Line:
        """Relative gap of the validation loss to the baseline [%] against tokens; seeds are paired."""
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


def shared_facts(run: Run) -> dict[str, Any]:
    """Hashes of what every recipe of a seed must share."""
    return {fact: run.manifest["hashes"][fact] for fact in SHARED}
