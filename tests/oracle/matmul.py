"""The reference GEMM (section 12): exact sums (class E), or fp64 segment by segment (class W)."""

from collections.abc import Iterator
from fractions import Fraction

from oracle.floats import BF16, FP16, FP32, FP64, NAN, ONE, Binary, convert, exponent_field, power_of_two
from oracle.grids import E4M3
from oracle.layout import Rows
from oracle.operand import Operand

OUT = {"float32": FP32, "bfloat16": BF16, "float16": FP16}
UNIT = 1 << 20


def is_exact(a: Operand, b: Operand) -> bool:
    """Class E."""
    four_bit = all(
        o.element is not None and o.element.bits == 4 and o.spec.kind.scale is E4M3 and o.spec.one_fp32_scale
        for o in (a, b)
    )
    formats = {o.spec.format for o in (a, b)}
    whole = formats in ({"fp8"}, {"int8"}) and all(o.spec.blocks == (0, 0) for o in (a, b))
    return four_bit or whole


def check(a: Operand, b: Operand) -> None:
    same = (a.spec.rht, a.signs) == (b.spec.rht, b.signs)
    if (a.length, a.padded) != (b.length, b.padded) or not same:
        raise ValueError("matmul needs equal contraction lengths and the identical transform")


def is_poisoned(o: Operand, i: int) -> bool:
    """Whether a scale of stored row i, or the global scale, is NaN."""
    if isinstance(o.global_scale, int) and FP32.is_nan(o.global_scale):
        return True
    return any(FP32.is_nan(o.s(i, j)) for j in range(o.padded))


def units(o: Operand, i: int, scaled: bool) -> list[int]:
    """Row i in units of 2^-20, in which decode(code) is an int, and so is its product with an E4M3 scale."""
    row = []
    for j in range(o.padded):
        value = FP32.value(o.q(i, j)) * (FP32.value(o.s(i, j)) if scaled else 1) * UNIT
        assert value.denominator == 1
        row.append(value.numerator)
    return row


def exact_sum(row_a: list[int], row_b: list[int]) -> int:
    """fp32 of the exact sum of (q_a * s_a) * (q_b * s_b)."""
    return FP32.of(Fraction(sum(u * v for u, v in zip(row_a, row_b, strict=True)), UNIT * UNIT))


def segments(a: Operand, b: Operand) -> Iterator[range]:
    """Class W: cuts at multiples of 128 and of both block lengths along the contraction."""
    lengths = [128] + [o.spec.blocks[1] for o in (a, b) if o.has_block_scale]
    cuts = sorted({j for length in lengths for j in range(0, a.padded, length)})
    return (range(start, end) for start, end in zip(cuts, [*cuts[1:], a.padded], strict=False))


def segment_scale(o: Operand, i: int, j: int) -> int:
    """fp64 of the block scale times, for nvfp4-double, the outer scale; exact."""
    outer = ONE if isinstance(o.global_scale, int) else o.outer(i, j)
    return FP64.of(FP32.value(o.s(i, j)) * FP32.value(outer))


def segment_sum(products: list[int]) -> int:
    """fp64(D_g): the exact sum, rounded once."""
    return FP64.of(Fraction(sum(products), UNIT * UNIT))


def wide_sum(a: Operand, b: Operand, m: int, n: int, row_a: list[int], row_b: list[int]) -> int:
    """fp32 of the sum over segments."""
    acc = 0
    for segment in segments(a, b):
        d = segment_sum([row_a[j] * row_b[j] for j in segment])
        s_a, s_b = segment_scale(a, m, segment.start), segment_scale(b, n, segment.start)
        acc = FP64.add(acc, FP64.mul(FP64.mul(d, s_a), s_b))
    return convert(acc, FP64, FP32)


def balanced(S_a: int, S_b: int) -> tuple[int, int]:
    """The global scales, of which one is multiplied and one divided by 2^k."""
    k = max(-126, min(126, (exponent_field(S_a) - exponent_field(S_b)) // 2))
    return FP32.mul(S_a, power_of_two(-k)), FP32.mul(S_b, power_of_two(k))


def matmul(a: Operand, b: Operand, out_dtype: str = "bfloat16", bias: list[int] | None = None) -> Rows:
    """Stored rows of a times stored rows of b: patterns of out_dtype. bias: fp32, one per row of b."""
    check(a, b)
    exact = is_exact(a, b)
    out: Binary = OUT[out_dtype]
    S_a, S_b = balanced(*(o.global_scale if isinstance(o.global_scale, int) else ONE for o in (a, b)))
    rows_a, rows_b = (
        [None if is_poisoned(o, i) else units(o, i, scaled=exact) for i in range(o.rows)] for o in (a, b)
    )

    def entry(m: int, n: int) -> int:
        row_a, row_b = rows_a[m], rows_b[n]
        if row_a is None or row_b is None:
            return NAN
        acc = exact_sum(row_a, row_b) if exact else wide_sum(a, b, m, n, row_a, row_b)
        y = FP32.mul(FP32.mul(acc, S_a), S_b)
        return y if bias is None else FP32.add(y, bias[n])

    return [[convert(entry(m, n), FP32, out) for n in range(b.rows)] for m in range(a.rows)]
