"""The source of a sample, and its index within that source, in constant time.

A run of N samples is divided into phases at fractions of N. Within a phase the sources take turns in a fixed
order of P = `period` slots, repeated to the end of the phase; source s owns w_s of them (its integer weight).
The order is scheduled earliest deadline first: the m-th turn of s is released at slot floor((m-1) P / w_s)
and must come before slot ceil(m P / w_s). Such a schedule always exists and earliest-deadline-first finds it
(Baruah et al., "Proportionate progress", Algorithmica 1996), so after ANY prefix of a phase every source is
less than one sample away from its exact share.

Each source has one cursor for the whole run: a phase continues where the one before it ended. So the source
and cursor of sample i take a division, a table lookup and an addition, and no table grows with the run.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np
import numpy.typing as npt

from fourbits.settings import nearest

MAX_PERIOD = 65_536
SUM_TOLERANCE = 1e-6

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of the run, up to the fraction `until` of all samples; `weights` are shares that sum to 1."""

    until: float
    weights: dict[str, float]


@dataclass(frozen=True, slots=True)
class IntegerWeights:
    """Shares as slots of a period. error: the largest |slots / period - share| of any source."""

    period: int
    slots: dict[str, int]
    error: float


def integer_weights(weights: Mapping[str, float]) -> IntegerWeights:
    """Convert shares to whole slots: exactly if a period <= 65,536 allows it, else by largest remainder.

    A source with a positive weight keeps at least one slot; a weight below half a slot is an error, because
    rounding it would drop the source, or read far more of it than requested.
    Raises ValueError for negative weights, a sum other than 1, or a weight too small for the period.
    """
    for name, weight in weights.items():
        if not 0 <= weight <= 1:
            raise ValueError(
                f"blend: the weight of {name!r} must be between 0 and 1, got {weight}. Give each source its "
                "share of the tokens."
            )
    total = sum(weights.values())
    if abs(total - 1) > SUM_TOLERANCE:
        raise ValueError(
            f"blend: the weights must sum to 1, got {total:g} from {dict(weights)}. Divide each by their sum."
        )
    exact = {name: Fraction(weight).limit_denominator(MAX_PERIOD) for name, weight in weights.items()}
    is_exact = all(abs(float(exact[name]) - weight) < 1e-12 for name, weight in weights.items())
    period = lcm(*(share.denominator for share in exact.values()))
    if is_exact and sum(exact.values()) == 1 and period <= MAX_PERIOD:
        return IntegerWeights(period, {name: int(share * period) for name, share in exact.items()}, 0.0)
    return _largest_remainder(weights)


def _largest_remainder(weights: Mapping[str, float]) -> IntegerWeights:
    total = sum(Fraction(weight) for weight in weights.values())
    ideal = {name: Fraction(weight) / total * MAX_PERIOD for name, weight in weights.items()}
    for name, slots in ideal.items():
        if 0 < slots < Fraction(1, 2):
            raise ValueError(
                f"blend: the weight {weights[name]:g} of {name!r} is less than half of 1/{MAX_PERIOD}, the "
                f"smallest share in a phase. Raise it, or remove the source from this phase."
            )
    slots = {name: max(int(value), 1 if value > 0 else 0) for name, value in ideal.items()}
    while sum(slots.values()) < MAX_PERIOD:
        slots[max(slots, key=lambda name: ideal[name] - slots[name])] += 1
    while (
        sum(slots.values()) > MAX_PERIOD
    ):  # the slots of sources that were raised to one come from the others
        above_one = [name for name in slots if slots[name] > 1]
        slots[max(above_one, key=lambda name: slots[name] - ideal[name])] -= 1
    error = max(float(abs(slots[name] - ideal[name])) / MAX_PERIOD for name in slots)
    return IntegerWeights(MAX_PERIOD, slots, error)


def fair_order(slots: Sequence[int]) -> Int64:
    """The order of turns in a period: int64 [sum(slots)]; entry r is the source that owns slot r.

    After any prefix of r slots, the number of turns of source s is within one of r * slots[s] / sum(slots).
    """
    period = sum(slots)
    turns: list[tuple[int, int, int]] = []
    for source, count in enumerate(slots):
        turns += [(m * period // count, -(-(m + 1) * period // count), source) for m in range(count)]
    turns.sort()
    order = np.empty(period, dtype=np.int64)
    released: list[tuple[int, int]] = []
    next_turn = 0
    for slot in range(period):
        while next_turn < period and turns[next_turn][0] <= slot:
            heapq.heappush(released, turns[next_turn][1:])
            next_turn += 1
        order[slot] = heapq.heappop(released)[1]
    return order


@dataclass(frozen=True, slots=True)
class _BoundPhase:
    """A phase with its tables. rank[r]: earlier slots of the same source; slots_of[s]: the slots of s."""

    first: int
    end: int
    weights: IntegerWeights
    order: Int64
    rank: Int64
    slots_of: tuple[Int64, ...]
    cursors: Int64

    def turns_before(self, position: int) -> Int64:
        """How many of the first `position` samples of the phase come from each source. int64 [sources]."""
        periods, rest = divmod(position, len(self.order))
        partial = [int(np.searchsorted(slots, rest)) for slots in self.slots_of]
        return np.array(
            [periods * len(s) + p for s, p in zip(self.slots_of, partial, strict=True)], dtype=np.int64
        )


class Blend:
    """The blend of a run over the sources `names`: phases, their boundaries, and each source's cursor."""

    def __init__(self, names: Sequence[str], phases: Sequence[Phase], total_samples: int) -> None:
        """Raises ValueError for phases that do not tile (0, 1], unknown sources, or invalid weights."""
        if total_samples < 1:
            raise ValueError(
                f"blend: a run needs at least 1 sample, got {total_samples}. Raise train.steps or "
                "train.tokens."
            )
        _check_phases(names, phases)
        self.names = tuple(names)
        self.total_samples = total_samples
        self.phases: list[_BoundPhase] = []
        first, cursors = 0, np.zeros(len(names), dtype=np.int64)
        for phase in phases:
            end = _boundary(phase.until, total_samples)
            bound = _bind_phase(self.names, phase, first, end, cursors)
            self.phases.append(bound)
            first, cursors = end, cursors + bound.turns_before(end - first)
        self._ends = np.array([phase.end for phase in self.phases], dtype=np.int64)

    def locate(self, samples: Int64) -> tuple[Int64, Int64]:
        """Source and cursor of each sample. samples: int64 [n] -> (source [n], index in that source [n]).

        Behind the end of the run, the last phase continues.
        """
        source = np.empty(len(samples), dtype=np.int64)
        cursor = np.empty(len(samples), dtype=np.int64)
        phase_of = np.searchsorted(self._ends[:-1], samples, side="right")
        for number in np.unique(phase_of):
            phase, in_phase = self.phases[number], phase_of == number
            periods, slot = np.divmod(samples[in_phase] - phase.first, len(phase.order))
            turn = phase.order[slot]
            per_period = np.array([len(slots) for slots in phase.slots_of], dtype=np.int64)
            source[in_phase] = turn
            cursor[in_phase] = phase.cursors[turn] + periods * per_period[turn] + phase.rank[slot]
        return source, cursor

    def cursors(self, sample: int) -> dict[str, int]:
        """How many samples before `sample`, which may be behind the end, come from each source."""
        number = min(int(np.searchsorted(self._ends, sample, side="right")), len(self.phases) - 1)
        phase = self.phases[number]
        counts = phase.cursors + phase.turns_before(sample - phase.first)
        return {name: int(count) for name, count in zip(self.names, counts, strict=True)}


def _boundary(fraction: float, total: int) -> int:
    # Via the shortest decimal: 0.7 of 10 is 7, although the double nearest to 0.7 is below it.
    return int(Fraction(repr(float(fraction))) * total + Fraction(1, 2))


def _check_phases(names: Sequence[str], phases: Sequence[Phase]) -> None:
    if not phases:
        raise ValueError("blend: a run needs at least one phase, got none. Add one.")
    before = 0.0
    for number, phase in enumerate(phases, start=1):
        if not before < phase.until <= 1:
            raise ValueError(
                f"blend: phase {number} must end after {before:g} and at most at 1, got "
                f"until={phase.until}. Give the phases in order."
            )
        before = phase.until
        for name in phase.weights:
            if name not in names:
                raise ValueError(
                    f"blend: phase {number} has a weight for {name!r}; the sources are {', '.join(names)}."
                    f"{nearest(name, list(names))}"
                )
    if before != 1:
        raise ValueError(
            f"blend: the last phase must end at 1 (the end of the run), got until={before}. "
            "Set its until to 1."
        )


def _bind_phase(names: Sequence[str], phase: Phase, first: int, end: int, cursors: Int64) -> _BoundPhase:
    weights = integer_weights({name: phase.weights.get(name, 0.0) for name in names})
    order = fair_order([weights.slots[name] for name in names])
    slots_of = tuple(np.flatnonzero(order == source) for source in range(len(names)))
    rank = np.empty(len(order), dtype=np.int64)
    for slots in slots_of:
        rank[slots] = np.arange(len(slots))
    return _BoundPhase(first, end, weights, order, rank, slots_of, cursors)
