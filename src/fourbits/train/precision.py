"""The precision schedule of a run, in steps: what its recipe's phases mean for its length, rate and data."""

from typing import Any

from fourbits.data.stream.stream import PhasedStream
from fourbits.linear.layer_phases import precision_table
from fourbits.recipe.recipe import Recipe
from fourbits.recipe.schedule import PrecisionPhase
from fourbits.train.config import RunConfig
from fourbits.train.schedule import decay_steps, warmup_steps


def recipe_of_run(config: RunConfig, stream: PhasedStream) -> Recipe:
    """The run's recipe with its schedule in steps. Raises ValueError for phases that do not fit the run.

    stream: the run's samples, where phases of the data begin.
    """
    firsts = [phase.first for phase in stream.blend.phases[1:]]
    return recipe_in_steps(config, tuple(-(-first // config.train.samples_per_step) for first in firsts))


def check_schedule(config: RunConfig) -> None:
    """Raises ValueError for phases that do not fit the run, as far as it does not depend on the data."""
    for phase in config.recipe.schedule:
        precision_table(phase)
    if not uses_data(config.recipe):
        recipe_in_steps(config, ())


def phase_name(recipe: Recipe, step: int) -> str:
    """The active phases of a step, by name, or an empty string."""
    return ", ".join(phase.name for phase in recipe.schedule if phase.weight_at(step) > 0)


def same_until(old: RunConfig, new: RunConfig, done: int) -> int:
    """How many of the first `done` steps have the same precision in two runs that differ in length."""
    if uses_data(old.recipe):
        return done
    before, after = (recipe_in_steps(config, ()) for config in (old, new))
    if before.oscillation != after.oscillation and before.oscillation and after.oscillation:
        done = min(done, before.oscillation.first, after.oscillation.first)
    for step in range(done if before.schedule else 0):
        pairs = zip(before.schedule, after.schedule, strict=True)
        if any(a.weight_at(step) != b.weight_at(step) for a, b in pairs):
            return step
    return done


def phase_at(recipe: Recipe, step: int) -> tuple[str, str | None]:
    """The phases in a step, 1 for the first, and a message if they differ from those of the step before."""
    name = phase_name(recipe, step - 1)
    if step == 1 or name == phase_name(recipe, step - 2):
        return name, None
    return name, f"step {step}: precision: {name or f'recipe {recipe.name} alone'}"


def described(recipe: Recipe) -> list[dict[str, Any]]:
    """The phases in plain values, for a manifest. first_step, last_step: counted from 1, as in metrics."""
    return [_described(phase) for phase in recipe.schedule]


def recipe_in_steps(config: RunConfig, data_starts: tuple[int, ...]) -> Recipe:
    """As `recipe_of_run`. data_starts: the first steps of the second and later phases of the data."""
    steps, optim = config.train.num_steps, config.optim
    return config.recipe.for_run(steps, warmup_steps(steps, optim), decay_steps(steps, optim), data_starts)


def _described(phase: PrecisionPhase) -> dict[str, Any]:
    start, end = phase.span
    return {
        "name": phase.name,
        "first_step": start + 1,
        "last_step": end,
        "gemms": list(phase.affected),
        "layers": list(phase.layers),
        "precision": phase.precision,
        "blend_in": phase.blend_in,
        "blend_out": phase.blend_out,
    }


def uses_data(recipe: Recipe) -> bool:
    """Whether a phase begins or ends where a phase of the data begins."""
    points = [point for phase in recipe.schedule for point in (phase.start, phase.end)]
    points += [recipe.oscillation.start] if recipe.oscillation is not None else []
    return any(isinstance(point, str) and point.startswith("data-") for point in points)
