"""Four Over Six and scale search (section 7.5): every candidate scale of a block, its error, the winner."""

from dataclasses import dataclass

from oracle.floats import (
    FP32,
    ONE,
    ZERO,
    exponent_field,
    halving_tree,
    power_of_two,
    row_sum,
)
from oracle.grids import E4M3, Grid
from oracle.layout import Box, Rows
from oracle.scales import Encode, RoundScale, block_scale, multiplier
from oracle.spec import Constants, Spec


@dataclass(frozen=True)
class Block:
    """What a choice looks at: the block's elements by row, its height and the constants in force."""

    rows: Rows
    height: int
    element: Grid
    encode: Encode
    constants: Constants
    spec: Spec


def block_of(y: Rows, box: Box, encode: Encode, c: Constants, spec: Spec) -> Block:
    assert spec.kind.element is not None
    rows = [[y[i][j] for j in box.columns] for i in box.rows]
    return Block(rows, spec.blocks[0], spec.kind.element, encode, c, spec)


def shift(amax: int) -> int:
    """u: the power of two that brings amax near 1."""
    return power_of_two(127 - min(max(exponent_field(amax), 1), 253))


def error(s: int, b: Block) -> int:
    """mse, mae or max over the block of d, the candidate's value minus y, both times u."""
    u = shift(b.encode.amax)
    e = multiplier(s, E4M3, b.encode.dec)
    amax, dec = FP32.mul(b.encode.amax, u), FP32.mul(b.encode.dec, u)

    def difference(y: int) -> int:
        q = b.element.decode(b.element.nearest(FP32.mul(y, e)))
        qs = FP32.mul(q, E4M3.decode(s))
        pow2 = b.spec.fp32_scale == "pow2"
        value = FP32.mul(qs, dec) if pow2 else FP32.div(FP32.mul(qs, amax), b.constants.T)
        return FP32.sub(value, FP32.mul(y, u))

    d = [[FP32.abs(difference(y)) for y in row] for row in b.rows]
    if b.spec.metric == "max":
        return max((value for row in d for value in row), default=ZERO)
    if b.spec.metric == "mse":
        d = [[FP32.mul(value, value) for value in row] for row in d]
    sums = [row_sum(row) for row in d]
    return halving_tree(sums + [ZERO] * (b.height - len(sums)))


def first_best(candidates: list[int], b: Block) -> int:
    """Place of the candidate with the least error; the earlier one at a tie."""
    best, least = 0, None
    for place, s in enumerate(candidates):
        e = error(s, b)
        if least is None or FP32.less(e, least):
            best, least = place, e
    return best


def search_codes(c: int) -> list[int]:
    """c, seven codes upwards, eight downwards, within 1 .. 126."""
    return [c, *range(c + 1, min(c + 7, 126) + 1), *range(c - 1, max(c - 8, 1) - 1, -1)]


def choose(ba: int, b: Block, round_scale: RoundScale) -> tuple[int, int]:
    """(s8, p) of a block with maximum ba. round_scale rounds the winner of 4over6."""
    emax = FP32.of(b.element.largest)
    p = FP32.mul(FP32.div(ba, emax), b.encode.enc)
    if b.spec.sr_headroom:
        p = FP32.mul(p, ONE_AND_A_SIXTEENTH)
    if b.spec.scale_rule.startswith("search"):
        codes = search_codes(block_scale(p, b.constants, E4M3.nearest))
        return codes[first_best(codes, b)], p
    unrounded = [p, FP32.mul(p, ONE_AND_A_HALF)]
    winner = first_best([block_scale(v, b.constants, E4M3.nearest) for v in unrounded], b)
    return block_scale(unrounded[winner], b.constants, round_scale), p


ONE_AND_A_SIXTEENTH = ONE | 1 << 19
ONE_AND_A_HALF = ONE | 1 << 22
