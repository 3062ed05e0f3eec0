"""Precision schedules: phases of a run in which some GEMMs of some layers have another precision.

A schedule is data. A phase begins and ends at a step, at a share of the run, or where the learning rate or
the data changes; `resolved` turns all of these into steps once the run's shape is known. docs/precision.md.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from fourbits.settings import nearest

Gemm = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
#: names of sets of GEMMs
_GROUPS: Mapping[str, tuple[Gemm, ...]] = {
    "both": GEMMS,
    "forward": ("fprop",),
    "backward": ("dgrad", "wgrad"),
    "fprop": ("fprop",),
    "dgrad": ("dgrad",),
    "wgrad": ("wgrad",),
}
#: points in time that have a name, besides the beginnings of data phases, data-2, data-3, ...
_EVENTS = ("warmup-end", "decay-start", "end")
_FORMS = "a step (2000), a share of the run (0.82, '82%', '8/62'), warmup-end, decay-start, data-N or end"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPhase:
    """Steps in which some GEMMs of some layers have another precision. Raises ValueError for invalid fields.

    A point is a step, counted from 0, a share of the run (0.82, "82%", "8/62"), "warmup-end" or "decay-start"
    of the learning rate, "data-N", where the N-th phase of the data begins, or "end", after the last step.
    """

    name: str
    #: the first step of the phase, and the first one after it
    start: int | float | str = 0
    end: int | float | str = "end"
    gemms: Literal["both", "forward", "backward", "fprop", "dgrad", "wgrad"] | tuple[Gemm, ...] = "both"
    #: shell-style patterns of the names of layers; layers that the recipe keeps in BF16 stay so
    layers: tuple[str, ...] = ("*",)
    #: bf16, or the shipped recipe whose GEMMs the phase takes, such as mxfp8
    precision: str = "bf16"
    #: how many of the phase's first and last steps, or their share of the run, mix it with what it replaces:
    #: outputs and gradients are weighted means, and both are computed
    blend_in: int | float = 0
    blend_out: int | float = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must be text, got ''. Name the phase, for charts and logs.")
        for field in ("start", "end"):
            point_of(getattr(self, field), field)
        for field in ("blend_in", "blend_out"):
            value: int | float = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or _negative(value):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(
                    f"{field} must be a number of steps or a share of the run, got {value!r}. Pass a count "
                    "such as 100, or a share such as 0.05."
                )
        given: Any = self.layers
        if isinstance(given, str) or not all(isinstance(each, str) for each in given):
            raise ValueError(f"layers must be a list of patterns of layer names, got {given!r}. Pass a list.")
        if not self.layers:
            raise ValueError("layers must be patterns of layer names, got none. Omit it for all layers.")
        names: Sequence[str] = (self.gemms,) if isinstance(self.gemms, str) else self.gemms
        known = tuple(_GROUPS) if isinstance(self.gemms, str) else GEMMS
        for name in names:
            if name not in known:
                raise ValueError(
                    f"gemms must be one of {', '.join(known)}, got {name!r}.{nearest(name, known)} Pass one "
                    "or more of these."
                )
        if not names:
            raise ValueError(f"gemms must be one of {', '.join(GEMMS)}, got none. Pass one or more.")

    @property
    def affected(self) -> tuple[Gemm, ...]:
        """The GEMMs of the phase, one by one."""
        if isinstance(self.gemms, str):
            return _GROUPS[self.gemms]
        return tuple(name for name in GEMMS if name in self.gemms)

    @property
    def is_resolved(self) -> bool:
        """Whether start, end and blends are steps."""
        return all(type(value) is int for value in (self.start, self.blend_in, self.blend_out)) and (
            type(self.end) is int or self.end == "end"
        )

    @property
    def span(self) -> tuple[int, int | None]:
        """First step, and first step after the phase (None: it does not end). ValueError if not resolved."""
        if not self.is_resolved:
            raise ValueError(
                f"schedule: phase {self.name!r} depends on the length of the run, got start {self.start!r} "
                f"and end {self.end!r}. Convert to recipe.for_run(steps=..., warmup=..., decay=...)."
            )
        assert isinstance(self.start, int)
        return self.start, self.end if isinstance(self.end, int) else None

    def weight_at(self, step: int) -> float:
        """The weight of the phase in a step: 0 outside, 1 inside, in between while it blends."""
        start, end = self.span
        assert isinstance(self.blend_in, int)
        assert isinstance(self.blend_out, int)
        if step < start or (end is not None and step >= end):
            return 0.0
        weight = (step - start + 1) / (self.blend_in + 1)
        if end is not None:
            weight = min(weight, (end - step) / (self.blend_out + 1))
        return min(1.0, weight)

    def describe(self) -> str:
        """The phase in one line, for logs."""
        names = self.gemms if isinstance(self.gemms, str) else "+".join(self.affected)
        where = "" if self.layers == ("*",) else f" of {', '.join(self.layers)}"
        forward = "forward and backward" if names == "both" else names
        return f"{forward}{where} in {self.precision}"


class RunShape(NamedTuple):
    """The shape of a run, which turns points into steps. data_starts: first steps of later data phases."""

    steps: int
    warmup: int = 0
    decay: int = 0
    data_starts: tuple[int, ...] = ()


class Stage(NamedTuple):
    """Indices of the phases that are active in a step: fully, and while they blend (at most one)."""

    full: tuple[int, ...] = ()
    blending: tuple[int, ...] = ()


def stage_at(schedule: Sequence[PrecisionPhase], step: int) -> Stage:
    """The stage of a step. Raises ValueError for a schedule that is not resolved."""
    weights = [phase.weight_at(step) for phase in schedule]
    return Stage(
        tuple(index for index, weight in enumerate(weights) if weight == 1),
        tuple(index for index, weight in enumerate(weights) if 0 < weight < 1),
    )


def resolved(schedule: Sequence[PrecisionPhase], run: RunShape) -> tuple[PrecisionPhase, ...]:
    """The schedule with steps in place of other points, for a run of this shape.

    Raises ValueError for a phase that is empty or beyond the end of the run, for phases that overlap, and for
    two that blend in the same step.
    """
    for name, value, least in (("steps", run.steps, 1), ("warmup", run.warmup, 0), ("decay", run.decay, 0)):
        if not least <= value <= run.steps:
            raise ValueError(
                f"for_run: {name} must be at least {least} and at most the steps of the run, got {value} of "
                f"{run.steps}. Correct it."
            )
    found = tuple(_resolved(phase, run) for phase in schedule)
    check_steps(found)
    return found


def check_steps(schedule: Sequence[PrecisionPhase]) -> None:
    """Raises ValueError for a phase that is not in steps, has no step or no room for its blends, for phases
    that certainly overlap, and for two that blend in the same step.
    """
    for index, phase in enumerate(schedule):
        start, end = phase.span  # raises if it is not in steps
        assert isinstance(phase.blend_in, int)
        assert isinstance(phase.blend_out, int)
        _require_extent(phase, start, end, phase.blend_in, phase.blend_out, end is not None)
        for other in schedule[:index]:
            if "*" in phase.layers or "*" in other.layers or set(phase.layers) & set(other.layers):
                require_no_overlap(phase, other, "")
            blends = [_blend_steps(each) for each in (phase, other)]
            if any(a[0] < b[1] and b[0] < a[1] for a in blends[0] for b in blends[1]):
                raise ValueError(
                    f"schedule: only one phase may blend in a step, got {other.name!r} and {phase.name!r}. "
                    "Move one, or shorten blend_in or blend_out."
                )


def require_no_overlap(phase: PrecisionPhase, other: PrecisionPhase, layer: str) -> None:
    """Raises ValueError if two phases of one layer set one GEMM in the same step."""
    (start, end), (other_start, other_end) = phase.span, other.span
    shared = [name for name in phase.affected if name in other.affected]
    meet = (end is None or other_start < end) and (other_end is None or start < other_end)
    if shared and meet:
        where = f" of {layer!r}" if layer else ""
        raise ValueError(
            f"schedule: phases must not overlap in {shared[0]}{where}, got {other.name!r} (steps "
            f"{other_start} to {other_end or 'end'}) and {phase.name!r} (steps {start} to {end or 'end'}). "
            "Move one, or give them other gemms or layers."
        )


def _resolved(phase: PrecisionPhase, run: RunShape) -> PrecisionPhase:
    named = f"schedule: phase {phase.name!r}"
    start, end = (step_of(getattr(phase, field), named, field, run) for field in ("start", "end"))
    if start is None or start >= run.steps:
        raise ValueError(
            f"schedule: phase {phase.name!r} must begin before the end of the run, got {phase.start!r} of "
            f"{run.steps} steps. Begin it earlier, or make the run longer."
        )
    if end is not None and end > run.steps:
        raise ValueError(
            f"schedule: phase {phase.name!r} must end within the run, got {phase.end!r} of {run.steps} "
            "steps. End it earlier, or at 'end'."
        )
    blend_in, blend_out = (_steps(value, run.steps) for value in (phase.blend_in, phase.blend_out))
    last = run.steps if end is None else end
    _require_extent(phase, start, last, blend_in, blend_out, end is not None)
    return replace(
        phase, start=start, end="end" if last == run.steps else last, blend_in=blend_in, blend_out=blend_out
    )


def _require_extent(
    phase: PrecisionPhase, start: int, last: int | None, blend_in: int, blend_out: int, ends: bool
) -> None:
    """Raises ValueError for a phase without a step, and for blends that do not fit in it.

    last: the first step after it, None if that is not known.
    """
    if last is not None and last <= start:
        raise ValueError(
            f"schedule: phase {phase.name!r} has no step: it begins at step {start} and ends at step {last}. "
            "Move its start or end, or make the run longer."
        )
    if (last is not None and blend_in + blend_out > last - start) or (blend_out and not ends):
        length = "" if last is None else f" in {last - start} steps"
        raise ValueError(
            f"schedule: phase {phase.name!r} must be at least as long as its blends, got blend_in {blend_in} "
            f"and blend_out {blend_out}{length}{'' if ends else ' without an end'}. Shorten them."
        )


def step_of(value: int | float | str, subject: str, field: str, run: RunShape) -> int | None:
    """The step of a point in a run of this shape; None for "end". subject, field: for errors.

    Raises ValueError for a point that the run does not have.
    """
    point = point_of(value, field)
    if isinstance(point, int):
        return point
    if isinstance(point, Fraction):
        return int(point * run.steps + Fraction(1, 2))
    if point == "end":
        return None
    if point == "warmup-end":
        return run.warmup
    if point == "decay-start":
        if not run.decay:
            raise ValueError(
                f"{subject} needs a decay of the learning rate, and the run has none. "
                "Give its start and end as steps or shares."
            )
        return run.steps - run.decay
    number = int(point.removeprefix("data-"))
    if number - 2 >= len(run.data_starts):
        raise ValueError(
            f"{subject} needs data phase {number}, and the data has "
            f"{len(run.data_starts) + 1}. Correct {field}, or add phases to data.phases."
        )
    return run.data_starts[number - 2]


def point_of(value: int | float | str, field: str) -> int | Fraction | str:
    """A point as a step, a share, or a name. Raises ValueError for anything else."""
    found: int | Fraction | str | None = None
    if type(value) is int and value >= 0:
        found = value
    elif isinstance(value, float) and 0 <= value <= 1:
        found = Fraction(str(value))
    elif isinstance(value, str):
        number = value.removeprefix("data-")
        if value in _EVENTS or (number != value and number.isdigit() and int(number) >= 2):
            return value
        with suppress(ValueError, ZeroDivisionError):
            share = Fraction(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
            found = share if 0 <= share <= 1 else None
    if found is None:
        hint = nearest(value, _EVENTS) if isinstance(value, str) else ""
        raise ValueError(f"{field} must be {_FORMS}, got {value!r}.{hint} Write it as one of these.")
    return found


def _negative(value: int | float) -> bool:
    return value < 0 or (isinstance(value, float) and value > 1)


def _steps(value: int | float, steps: int) -> int:
    return value if isinstance(value, int) else int(Fraction(str(value)) * steps + Fraction(1, 2))


def _blend_steps(phase: PrecisionPhase) -> list[tuple[int, int]]:
    """The ranges of steps in which a phase blends."""
    start, end = phase.span
    assert isinstance(phase.blend_in, int)
    assert isinstance(phase.blend_out, int)
    found = [(start, start + phase.blend_in)] if phase.blend_in else []
    return found + ([(end - phase.blend_out, end)] if end is not None and phase.blend_out else [])
