"""Oscillation: when weights that only flip between two codes are set to the centre of their bin."""

from dataclasses import dataclass, replace

from fourbits.recipe.schedule import RunShape, point_of, step_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Oscillation:
    """OsciReset of arXiv:2510.27527. Raises ValueError for invalid fields.

    After `window` steps of every `period`, each weight whose quantized value travelled at least `ratio` times
    as far as the weight itself is set to that value: the centre of its bin, the farthest from both edges.
    """

    #: steps in which weights are followed, which takes 16 bytes per weight
    window: int = 50
    #: steps from the beginning of a window to that of the next
    period: int = 200
    ratio: float = 8.0
    #: how many steps are done when the first window begins, or another point, as in a PrecisionPhase
    start: int | float | str = 0

    def __post_init__(self) -> None:
        if not 1 <= self.window <= self.period:
            raise ValueError(
                f"oscillation: window must be at least 1 and at most the period, got {self.window} of "
                f"{self.period} steps. Shorten it."
            )
        if not self.ratio >= 1:
            raise ValueError(
                f"oscillation: ratio must be at least 1, got {self.ratio}. Published: 4 and 8; a weight that "
                "moves steadily has about 1."
            )
        point_of(self.start, "oscillation: start")

    @property
    def first(self) -> int:
        """How many steps are done when the first window begins. Raises ValueError if that is not known."""
        if type(self.start) is not int:
            raise ValueError(
                f"oscillation: start depends on the length of the run, got {self.start!r}. Convert to "
                "recipe.for_run(steps=..., warmup=..., decay=...)."
            )
        return self.start

    def follows(self, done: int) -> bool:
        """Whether weights are followed after `done` finished steps."""
        return done >= self.first and (done - self.first) % self.period < self.window

    def for_run(self, run: RunShape) -> "Oscillation":
        """The same with a start in steps, for a run of this shape. ValueError for a start beyond its end."""
        first = step_of(self.start, "oscillation: its start", "start", run)
        if first is None or first >= run.steps:
            raise ValueError(
                f"oscillation: start must lie before the end of the run, got {self.start!r} of {run.steps} "
                "steps. Start earlier, or make the run longer."
            )
        return replace(self, start=first)
