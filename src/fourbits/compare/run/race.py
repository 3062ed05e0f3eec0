"""The order of runs in a comparison that stops early: seed by seed, over the recipes still in the race.

The finished runs determine which recipes have stopped, so a resumed comparison makes the same decisions.
"""

from collections.abc import Iterator, Mapping

from fourbits.compare.run.execute import outcome
from fourbits.compare.run.progress import MatrixProgress
from fourbits.compare.run.run_matrix import RunMatrix
from fourbits.compare.statistics.sequential import Losses, Race


class SeedRounds:
    """Rounds of runs for `execute_runs`. ran: the seeds of each recipe that count, after the last round."""

    def __init__(self, matrix: RunMatrix, progress: MatrixProgress, parallel: int) -> None:
        """parallel: runs in parallel; a round has several seeds if fewer would leave a process idle.

        Raises ValueError for a matrix that cannot be decided.
        """
        others = [recipe for recipe in matrix.recipes if recipe != matrix.baseline]
        if not others or len(matrix.seeds) < 2:
            raise ValueError(
                "--stop-early: compares intervals over seeds, so it needs two recipes and two seeds or "
                f"more, got {len(matrix.recipes)} and {len(matrix.seeds)}. Extend --recipes and --seeds, or "
                "remove --stop-early."
            )
        self.race = Race(matrix.baseline, others, len(matrix.seeds))
        self.ran: dict[str, tuple[int, ...]] = {}
        self._matrix, self._progress, self._parallel = matrix, progress, parallel

    def __iter__(self) -> Iterator[list[int]]:
        """Yield rounds of runs by number in the matrix; each is chosen when all earlier runs have ended."""
        matrix, race, seeds = self._matrix, self.race, 0
        while race.racing:
            size = max(1, self._parallel // (1 + len(race.racing)), 2 if seeds == 0 else 1)
            chosen = matrix.seeds[seeds : seeds + size]
            recipes = (matrix.baseline, *race.racing)
            yield [
                number
                for number, run in enumerate(matrix.runs)
                if run.seed in chosen and run.recipe in recipes
            ]
            seeds += len(chosen)
            self.ran |= dict.fromkeys(recipes, matrix.seeds[:seeds])
            stops = race.look(self._losses(recipes, matrix.seeds[:seeds]))
            for stop in stops:
                self._progress.note(f"{stop.recipe}: stops after {stop.seeds} seeds, {stop.text}")
            ended = len(stops) + (not race.racing)  # the baseline stops with the last recipe
            self._progress.skip_runs(ended * (len(matrix.seeds) - seeds))

    def _losses(self, recipes: tuple[str, ...], seeds: tuple[int, ...]) -> Mapping[str, Losses]:
        by_run = {(run.recipe, run.seed): run for run in self._matrix.runs}
        return {
            recipe: {seed: _final_loss(outcome(by_run[recipe, seed].folder)) for seed in seeds}
            for recipe in recipes
        }


def _final_loss(summary: Mapping[str, object]) -> float | None:
    """Validation loss of a run that finished; None for any other end."""
    loss = summary.get("val_loss")
    return loss if summary.get("ended") == "finished" and isinstance(loss, float) else None
