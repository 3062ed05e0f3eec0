"""Which source a sample comes from, and which of that source's samples it is, in constant time.

A run of N samples is cut into phases by fractions of N. Inside a phase the sources take turns in a fixed
order of `period` slots that is repeated to the end of the phase: source s owns w_s of them (integer
weights). The order is laid by earliest deadline: the m-th turn of s may come from slot floor((m-1) P / w_s)
on and must come before slot ceil(m P / w_s). Such an order always exists and earliest-deadline-first finds
it (Baruah et al., "Proportionate progress", Algorithmica 1996), so after ANY prefix of a phase every source
is less than one sample away from its exact share.

Each source has one cursor for the whole run: a phase starts counting where the one before it ended. Position
i is therefore answered with a division, one table look-up and an addition; nothing of the size of the run
exists.
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
    """A part of the run: ends at the fraction `until` of all samples; `weights` are shares, summing to 1."""

    until: float
    weights: dict[str, float]


@dataclass(frozen=True, slots=True)
class IntegerWeights:
    """Shares as slots of a period. error: the largest |slots / period - share| over the sources."""

    period: int
    slots: dict[str, int]
    error: float


def integer_weights(weights: Mapping[str, float]) -> IntegerWeights:
    """Turn shares into whole slots: exactly if a period <= 65,536 allows it, else by largest remainder.

    A source with a positive weight never loses all its slots: below half a slot it is an error, as silently
    dropping a source (or silently feeding it far more than asked) would be.
    Raises ValueError for negative weights, a sum other than 1, or a weight too small for the period.
    """
    for name, weight in weights.items():
        if not 0 <= weight <= 1:
            raise ValueError(f"blend: the weight of {name!r} must be between 0 and 1, got {weight}.")
    total = sum(weights.values())
    if abs(total - 1) > SUM_TOLERANCE:
        raise ValueError(f"blend: the weights must sum to 1, got {total:g} from {dict(weights)}.")
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
                f"smallest share a phase can give. Raise it, or leave the source out of this phase."
            )
    slots = {name: max(int(value), 1 if value > 0 else 0) for name, value in ideal.items()}
    while sum(slots.values()) < MAX_PERIOD:
        slots[max(slots, key=lambda name: ideal[name] - slots[name])] += 1
    while sum(slots.values()) > MAX_PERIOD:  # sources that were raised to one slot are paid for by the others
        above_one = [name for name in slots if slots[name] > 1]
        slots[max(above_one, key=lambda name: slots[name] - ideal[name])] -= 1
    error = max(float(abs(slots[name] - ideal[name])) / MAX_PERIOD for name in slots)
    return IntegerWeights(MAX_PERIOD, slots, error)


def fair_order(slots: Sequence[int]) -> Int64:
    """The order of turns in a period: int64 [sum(slots)], entry r the source that owns slot r.

    After every prefix of r slots, source s has had a number of turns within one of r * slots[s] / sum(slots).
    """
    period = sum(slots)
    turns: list[tuple[int, int, int]] = []
    for source, count in enumerate(slots):
        turns += [(m * period // count, -(-(m + 1) * period // count), source) for m in range(count)]
    turns.sort()
    order = np.empty(period, dtype=np.int64)
    waiting: list[tuple[int, int]] = []
    next_turn = 0
    for slot in range(period):
        while next_turn < period and turns[next_turn][0] <= slot:
            heapq.heappush(waiting, turns[next_turn][1:])
            next_turn += 1
        order[slot] = heapq.heappop(waiting)[1]
    return order


@dataclass(frozen=True, slots=True)
class _PlannedPhase:
    """A phase with its tables. rank[r]: earlier slots of the same source; slots_of[s]: the slots s owns."""

    first: int
    end: int
    weights: IntegerWeights
    order: Int64
    rank: Int64
    slots_of: tuple[Int64, ...]
    cursors: Int64

    def turns_before(self, position: int) -> Int64:
        """How often each source has come in the first `position` samples of the phase. int64 [sources]."""
        whole, rest = divmod(position, len(self.order))
        partial = [int(np.searchsorted(slots, rest)) for slots in self.slots_of]
        return np.array(
            [whole * len(s) + p for s, p in zip(self.slots_of, partial, strict=True)], dtype=np.int64
        )


class Blend:
    """The plan of a run over `names`: phases, their boundaries in samples, and every source's cursor."""

    def __init__(self, names: Sequence[str], phases: Sequence[Phase], total_samples: int) -> None:
        """Raises ValueError for phases that do not tile (0, 1], unknown sources, weights that do not sum."""
        if total_samples < 1:
            raise ValueError(f"blend: a run needs at least 1 sample, got {total_samples}.")
        _check_phases(names, phases)
        self.names = tuple(names)
        self.total_samples = total_samples
        self.phases: list[_PlannedPhase] = []
        first, cursors = 0, np.zeros(len(names), dtype=np.int64)
        for phase in phases:
            end = _boundary(phase.until, total_samples)
            planned = _plan_phase(self.names, phase, first, end, cursors)
            self.phases.append(planned)
            first, cursors = end, cursors + planned.turns_before(end - first)
        self._ends = np.array([phase.end for phase in self.phases], dtype=np.int64)

    def locate(self, samples: Int64) -> tuple[Int64, Int64]:
        """Source and cursor of each sample. samples: int64 [n] -> (source [n], place in that source [n])."""
        source = np.empty(len(samples), dtype=np.int64)
        cursor = np.empty(len(samples), dtype=np.int64)
        phase_of = np.searchsorted(self._ends, samples, side="right")
        for number in np.unique(phase_of):
            phase, mine = self.phases[number], phase_of == number
            whole, slot = np.divmod(samples[mine] - phase.first, len(phase.order))
            turn = phase.order[slot]
            per_period = np.array([len(slots) for slots in phase.slots_of], dtype=np.int64)
            source[mine] = turn
            cursor[mine] = phase.cursors[turn] + whole * per_period[turn] + phase.rank[slot]
        return source, cursor

    def cursors(self, sample: int) -> dict[str, int]:
        """How many samples of each source come before `sample`, which may equal total_samples."""
        number = min(int(np.searchsorted(self._ends, sample, side="right")), len(self.phases) - 1)
        phase = self.phases[number]
        counts = phase.cursors + phase.turns_before(sample - phase.first)
        return {name: int(count) for name, count in zip(self.names, counts, strict=True)}


def _boundary(fraction: float, total: int) -> int:
    # Through the shortest decimal: 0.7 of 10 is 7, although the double nearest to 0.7 lies below it.
    return int(Fraction(repr(float(fraction))) * total + Fraction(1, 2))


def _check_phases(names: Sequence[str], phases: Sequence[Phase]) -> None:
    if not phases:
        raise ValueError("blend: a run needs at least one phase, got none.")
    before = 0.0
    for number, phase in enumerate(phases, start=1):
        if not before < phase.until <= 1:
            raise ValueError(
                f"blend: phase {number} must end after {before:g} and at most at 1, got until={phase.until}."
            )
        before = phase.until
        for name in phase.weights:
            if name not in names:
                raise ValueError(
                    f"blend: phase {number} names the source {name!r}; there are {', '.join(names)}."
                    f"{nearest(name, list(names))}"
                )
    if before != 1:
        raise ValueError(f"blend: the last phase must end at 1 (the end of the run), got until={before}.")


def _plan_phase(names: Sequence[str], phase: Phase, first: int, end: int, cursors: Int64) -> _PlannedPhase:
    weights = integer_weights({name: phase.weights.get(name, 0.0) for name in names})
    order = fair_order([weights.slots[name] for name in names])
    slots_of = tuple(np.flatnonzero(order == source) for source in range(len(names)))
    rank = np.empty(len(order), dtype=np.int64)
    for slots in slots_of:
        rank[slots] = np.arange(len(slots))
    return _PlannedPhase(first, end, weights, order, rank, slots_of, cursors)
