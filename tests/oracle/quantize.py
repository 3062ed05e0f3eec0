"""Quantize (section 6): the order of work, poisoning (13), and scales and elements of every format (7)."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial

from oracle.choice import block_of, choose
from oracle.eden import group_codes
from oracle.floats import BF16, FP32, NAN, ONE, ZERO, convert, to_bf16
from oracle.grids import Grid, up_by_byte, up_by_word
from oracle.layout import Box, Rows, Tiling, padded_length, stored_rows
from oracle.noise import Key, byte, key_of, scale_word, word
from oracle.operand import Operand
from oracle.scales import (
    Encode,
    block_scale,
    e8m0_multiplier,
    e8m0_scale,
    encode_of,
    fp32_scale,
    is_saturated,
    largest_magnitude,
    multiplier,
)
from oracle.spec import Spec, constants, why_not
from oracle.transform import rht, signs


class Work:
    """One quantization: the stored matrix y, the spec and the key, and what is filled in."""

    def __init__(self, y: Rows, tiling: Tiling, spec: Spec, key: Key | None) -> None:
        self.y, self.tiling, self.spec, self.key = y, tiling, spec, key
        self.codes: Rows = [[0] * tiling.Cp for _ in y]
        self.saturated = 0

    @property
    def element(self) -> Grid:
        assert self.spec.kind.element is not None
        return self.spec.kind.element

    @property
    def scale(self) -> Grid:
        assert self.spec.kind.scale is not None
        return self.spec.kind.scale

    def inside(self, box: Box) -> list[int]:
        return [self.y[i][j] for i, j in box.cells()]

    def is_poisoned(self, box: Box) -> bool:
        return not all(FP32.is_finite(p) for p in self.inside(box))

    def round_element(self, v: int, i: int, j: int) -> int:
        """Section 4 or 10."""
        if self.spec.rounding == "rne":
            return self.element.nearest(v)
        assert self.key is not None
        if self.spec.rounding == "sr":
            return self.element.stochastic(v, up_by_byte(byte(self.key, i, j)))
        return self.element.stochastic(v, up_by_word(word(self.key, i, j)))

    def round_scale(self, box: Box) -> Callable[[int], int]:
        """Section 7.6, for the block of a box."""
        if self.spec.scale_rounding == "rne":
            return self.scale.nearest
        assert self.key is not None
        r = scale_word(self.key, box.rows.start, box.columns.start)
        return lambda p: self.scale.stochastic(p, up_by_word(r))

    def fill(self, box: Box, code: Callable[[int, int, int], int]) -> None:
        """codes of a block: code(y, i, j)."""
        for i, j in box.cells():
            self.codes[i][j] = code(self.y[i][j], i, j)

    def poison(self, box: Box, C: int) -> int:
        """Codes of a poisoned block, and its NaN scale."""
        kept = self.tiling.Cp if self.spec.rht else C
        self.fill(box, lambda y, i, j: self.element.saturated(y) if j < kept else 0)
        return NAN if self.spec.kind.scale is None else NAN_CODES[self.scale.name]


SATURATES_ABOVE = {"E4M3": Fraction(464), "E5M2": Fraction(61440), "INT8": Fraction(255, 2)}
NAN_CODES = {"E4M3": 0x7F, "E8M0": 0xFF, "UE5M3": 0xFF}


def two_level_block(w: Work, encode: Encode, box: Box) -> int:
    """Section 7.1 (and 7.5) for one finite block: fills its codes, returns s8."""
    c, ba = constants(w.spec), largest_magnitude(w.inside(box))
    if w.spec.scale_rule == "max":
        p = FP32.mul(ba, encode.k)
        s8 = block_scale(p, c, w.round_scale(box))
    else:
        s8, p = choose(ba, block_of(w.y, box, encode, c, w.spec), w.round_scale(box))
    w.saturated += is_saturated(p, w.scale)
    if s8 == 0 and not w.spec.te_compat:
        w.fill(box, lambda y, i, j: w.element.signed_zero(y))
    else:
        e = multiplier(s8, w.scale, encode.dec)
        w.fill(box, lambda y, i, j: w.round_element(FP32.mul(y, e), i, j))
    return s8


def e8m0_block(w: Work, box: Box) -> int:
    """Section 7.2 for one finite block."""
    b = e8m0_scale(largest_magnitude(w.inside(box)), w.element, w.spec.scale_rule)
    e = e8m0_multiplier(b)
    w.fill(box, lambda y, i, j: w.round_element(FP32.mul(y, e), i, j))
    return b


def fp32_block(w: Work, ba: int, box: Box) -> int:
    """Section 7.3 for one finite block, or the whole tensor."""
    enc, scale = fp32_scale(ba, w.element, w.spec.fp32_scale == "pow2")
    w.fill(box, lambda y, i, j: w.round_element(FP32.mul(y, enc), i, j))
    if w.spec.blocks == (0, 0):
        limit = FP32.of(SATURATES_ABOVE[w.element.name])
        w.saturated += sum(FP32.less(limit, FP32.abs(FP32.mul(y, enc))) for y in w.inside(box))
    return scale


def eden_rows(w: Work, encode: Encode, C: int) -> Rows:
    """Section 7.7: all groups of all rows; returns the block scales."""
    n, c, key = w.spec.rht, constants(w.spec), w.key
    assert key is not None
    table = []
    for i, row in enumerate(w.y):
        scales: list[int] = []
        for start in range(0, len(row), n):
            group = row[start : start + n]
            if not all(FP32.is_finite(p) for p in group):
                w.poison(Box(i, 0, range(i, i + 1), range(start, start + n)), C)
                scales += [0x7F] * (n // 16)
                continue
            decide = [up_by_word(scale_word(key, i, j)) for j in range(start, start + n, 16)]
            w.codes[i][start : start + n], corrected = group_codes(group, encode, c, decide)
            scales += corrected
        table.append(scales)
    return table


def per_tensor(w: Work, amax: int, C: int) -> tuple[Rows, int]:
    """(block scales, global scale) of formats with one fp32 scale per tensor."""
    if not FP32.is_finite(amax):
        scales = w.tiling.table(lambda box: w.poison(box, C))
        return (scales, ONE) if w.spec.blocks != (0, 0) else ([], NAN)
    if w.spec.blocks == (0, 0):
        box = w.tiling.box(0, 0)
        return [], w.poison(box, C) if w.is_poisoned(box) else fp32_block(w, amax, box)
    encode = encode_of(amax, constants(w.spec), w.spec)
    if w.spec.rounding == "ms-eden":
        return eden_rows(w, encode, C), encode.dec
    finite = partial(two_level_block, w, encode)
    return w.tiling.table(lambda box: w.poison(box, C) if w.is_poisoned(box) else finite(box)), encode.dec


def per_outer_block(w: Work, outer: Tiling, C: int) -> tuple[Rows, Rows]:
    """(block scales, outer scales) of nvfp4-double: each outer block by its own amax, poisoned as a whole."""
    c = constants(w.spec)
    encodes: dict[tuple[int, int], Encode | None] = {}
    for box in outer.boxes():
        amax = largest_magnitude(w.inside(box))
        encodes[box.bi, box.bj] = encode_of(amax, c, w.spec) if FP32.is_finite(amax) else None

    def scale(box: Box) -> int:
        encode = encodes[box.rows.start // outer.br, box.columns.start // outer.bc]
        return w.poison(box, C) if encode is None else two_level_block(w, encode, box)

    def outer_scale(box: Box) -> int:
        encode = encodes[box.bi, box.bj]
        return ONE if encode is None else encode.dec

    return w.tiling.table(scale), outer.table(outer_scale)


def per_block(w: Work, C: int) -> tuple[Rows, int]:
    """Block scales of formats whose blocks know nothing of each other; global scale 1."""
    if w.spec.kind.fp32 == "block":
        finite = lambda box: fp32_block(w, largest_magnitude(w.inside(box)), box)  # noqa: E731
    elif w.spec.kind.two_level:
        finite = partial(two_level_block, w, encode_of(ZERO, constants(w.spec), w.spec))
    else:
        finite = partial(e8m0_block, w)
    return w.tiling.table(lambda box: w.poison(box, C) if w.is_poisoned(box) else finite(box)), ONE


def transformed(
    x: Rows, shape: tuple[int, int], spec: Spec, axis: int, key: Key | None
) -> tuple[Rows, tuple[bool, ...]]:
    """y of section 6, steps 1 to 3, and the signs that rotated it."""
    source = [[to_bf16(p) for p in row] for row in x] if spec.source == "bf16" else x
    y = stored_rows(source, shape, axis, spec.rht)
    if not spec.rht:
        return y, ()
    minus = signs(spec.rht_signs, spec.rht, key)
    return [rht(row, minus) for row in y], tuple(minus)


def quantize(
    x: Rows,
    shape: tuple[int, int],
    spec: Spec,
    axis: int = 1,
    amax: int | None = None,
    sr_key: tuple[int, ...] | None = None,
) -> Operand:
    """Section 6. x: rows of fp32 patterns; amax: an fp32 pattern; sr_key: five or two ints.

    Raises ValueError for an invalid spec, an amax that has no effect, or a missing key.
    """
    if reason := why_not(spec):
        raise ValueError(reason)
    if amax is not None and not spec.one_fp32_scale:
        raise ValueError("amax has no effect on a format without one fp32 scale per tensor")
    key = None if sr_key is None else key_of(sr_key)
    if key is None and (spec.rounding != "rne" or spec.scale_rounding == "sr"):
        raise ValueError("stochastic rounding needs a key")
    y, minus = transformed(x, shape, spec, axis % 2, key)
    R, C = shape[1 - axis % 2], shape[axis % 2]
    w = Work(y, Tiling(R, padded_length(C, spec.rht), *spec.blocks), spec, key)
    if spec.kind.element is None:
        codes = [[convert(p, FP32, BF16) for p in row] for row in y] if spec.format == "bf16" else y
        return Operand(codes, [], ONE, shape, axis % 2, spec, minus)
    if spec.kind.fp32 == "outer":
        scales, global_scale = per_outer_block(w, Tiling(R, w.tiling.Cp, *spec.outer_blocks), C)
    elif spec.one_fp32_scale:
        own = largest_magnitude([p for row in y for p in row])
        scales, global_scale = per_tensor(w, own if amax is None else FP32.abs(amax), C)
    else:
        scales, global_scale = per_block(w, C)
    return Operand(w.codes, scales, global_scale, shape, axis % 2, spec, minus, w.saturated)
