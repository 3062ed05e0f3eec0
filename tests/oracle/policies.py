"""Amax policies (section 16) and the adaptive layout (section 17), as pure functions of their state."""

from dataclasses import dataclass, replace
from fractions import Fraction

from oracle.floats import FMAX, FP32, ZERO
from oracle.grids import E4M3
from oracle.layout import Box, Rows, Tiling
from oracle.scales import encode_of, largest_magnitude
from oracle.spec import Spec, constants


@dataclass(frozen=True)
class AmaxState:
    """fp32 patterns: filled entries of the history, newest first; pending None is the document's -1."""

    history: tuple[int, ...] = ()
    pending: int | None = None


def amax_used(state: AmaxState, spec: Spec, step: int, own: int) -> tuple[int, bool]:
    """(the amax that is used, whether own is observed)."""
    headroom = FP32.of(Fraction(spec.amax_headroom))
    newest = max(state.history, default=ZERO)
    if spec.amax_policy == "current":
        return own, False
    if spec.amax_policy == "interval":
        newest = state.history[0] if state.history else ZERO
        fresh = step % spec.amax_interval == 0 or newest == ZERO
        return (own if fresh else scaled(headroom, newest)), fresh
    return (own if newest == ZERO else scaled(headroom, newest)), True


def scaled(headroom: int, amax: int) -> int:
    return FP32.min(FP32.mul(headroom, amax), FMAX)


def observe(state: AmaxState, own: int) -> AmaxState:
    """pending = max(pending, own); a non-finite own is not observed."""
    if not FP32.is_finite(own):
        return state
    return replace(state, pending=own if state.pending is None else max(state.pending, own))


def commit(state: AmaxState, spec: Spec) -> AmaxState:
    """At the end of a step; pending is already the maximum over ranks."""
    length = spec.amax_history if spec.amax_policy == "history" else 1
    if state.pending is None:
        return state
    return AmaxState((state.pending, *state.history)[:length])


@dataclass(frozen=True)
class Counts:
    """n and m of section 17."""

    n: int
    m: int


def outer_counts(y: Rows) -> Counts:
    """1x16 blocks that are not zero, and those of them with a subnormal or zero scale."""
    spec = Spec(scale_bound=448)
    c = constants(spec)
    encode = encode_of(largest_magnitude([p for row in y for p in row]), c, spec)
    maxima = [ba for ba in block_maxima(y, 1) if ba]
    scales = [E4M3.nearest(FP32.min(FP32.mul(ba, encode.k), c.smax)) for ba in maxima]
    return Counts(len(maxima), sum(s8 < 8 for s8 in scales))


def block_counts(y: Rows) -> Counts:
    """Rows inside nonzero 16x16 blocks, and those two octaves below their block."""
    n = m = 0
    tiling = Tiling(len(y), len(y[0]) if y else 0, 16, 16)
    for box in tiling.boxes():
        tile = largest_magnitude([y[i][j] for i, j in box.cells()])
        if tile == ZERO:
            continue
        rows = [largest_magnitude([y[i][j] for j in box.columns]) for i in box.rows]
        n += len(rows)
        m += sum(FP32.less(FP32.mul(FP32.of(4), row), tile) for row in rows)
    return Counts(n, m)


def block_maxima(y: Rows, height: int) -> list[int]:
    def maximum(box: Box) -> int:
        return largest_magnitude([y[i][j] for i, j in box.cells()])

    return [maximum(box) for box in Tiling(len(y), len(y[0]) if y else 0, height, 16).boxes()]


def chooses_other(adaptive: str, counts: Counts) -> bool:
    """outer: nvfp4-double instead of nvfp4; block: 1x16 instead of 16x16."""
    return {"outer": 64, "block": 4}[adaptive] * counts.m > counts.n
