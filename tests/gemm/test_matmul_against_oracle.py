"""The reference product gives the oracle's bytes: exact sums, and fp64 segment by segment."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from fourbits.formats.codes import decode
from fourbits.formats.descriptors import E2M1, E4M3, E5M2, INT8
from fourbits.gemm.reference import matmul as matmul_reference
from oracle.bridge import patterns, raw_bits
from oracle.floats import BF16, FP16, FP32, Binary
from oracle.matmul import is_exact, matmul
from oracle.spec import Spec
from support.adversarial import FINITE, NON_FINITE
from support.agreement import by_fourbits, by_oracle

KEY = (3, 4, 5, 0, 0)
DTYPES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}

EXACT = {
    "nvfp4": (Spec(), Spec()),
    "nvfp4 with square blocks": (Spec(rounding="sr"), Spec(block=(16, 16))),
    "nvfp4, rotated": (Spec(rht=32, rounding="sr"), Spec(rht=32)),
    "nvfp4 and nvint4": (Spec(), Spec(format="nvint4", block=(16, 16))),
    "nve1m2": (Spec(format="nve1m2"), Spec(format="nve1m2")),
    "blocks that cross": (Spec(block=(3, 5)), Spec(block=(1, 24))),
    "fp8 per tensor": (Spec(format="fp8", block=(0, 0)), Spec(format="fp8", block=(0, 0))),
    "int8 per tensor": (Spec(format="int8", block=(0, 0)), Spec(format="int8", block=(0, 0))),
}
WIDE = {
    "double": (Spec(format="nvfp4-double"), Spec(format="nvfp4-double")),
    "double and nvfp4": (Spec(format="nvfp4-double", outer=(1, 32)), Spec(block=(16, 16))),
    "ue5m3 and nvfp4": (Spec(format="nvfp4-ue5m3"), Spec()),
    "mxfp4": (Spec(format="mxfp4"), Spec(format="mxfp4", block=(32, 32))),
    "mxfp8 and mxfp4": (Spec(format="mxfp8"), Spec(format="mxfp4")),
    "mxfp8-e5m2": (Spec(format="mxfp8-e5m2"), Spec(format="mxfp8-e5m2")),
    "e5m2 and e4m3": (Spec(format="fp8-e5m2"), Spec(format="fp8", block=(128, 128))),
    "fp8 in blocks": (Spec(format="fp8"), Spec(format="fp8", block=(128, 128))),
    "odd blocks": (Spec(format="fp8", block=(3, 5)), Spec(format="int8", block=(2, 24))),
    "nvfp4 and fp8 per tensor": (Spec(), Spec(format="fp8", block=(0, 0))),
    "e5m2 per tensor": (Spec(format="fp8-e5m2", block=(0, 0)), Spec(format="fp8-e5m2", block=(0, 0))),
}
PAIRS = EXACT | WIDE


def bits(rows: list[list[int]], binary: Binary) -> list[list[int]]:
    """Patterns with one NaN for all."""
    return [[binary.nan if binary.is_nan(p) else p for p in row] for row in rows]


def assert_same_product(
    x: Tensor,
    y: Tensor,
    pair: tuple[Spec, Spec],
    dtype: torch.dtype = torch.float32,
    bias: Tensor | None = None,
) -> list[list[int]]:
    left, right = pair
    q = by_fourbits(x, left, sr_key=KEY), by_fourbits(y, right, sr_key=KEY)
    o = by_oracle(x, left, sr_key=KEY), by_oracle(y, right, sr_key=KEY)
    ours = matmul_reference.matmul(q[0], q[1], dtype, bias)
    row = None if bias is None else patterns(bias.reshape(1, -1))[0]
    theirs = matmul(o[0], o[1], str(dtype).removeprefix("torch."), row)
    expected = bits(theirs, DTYPES[dtype])
    assert bits(raw_bits(ours), DTYPES[dtype]) == expected
    return expected


@pytest.mark.parametrize("name", PAIRS)
def test_products_equal_the_oracle(name):
    a, b = (by_oracle(torch.ones(1, 16), spec, sr_key=KEY) for spec in PAIRS[name])
    assert is_exact(a, b) == (name in EXACT)
    kinds = ["normal", "spread", "rows_apart", "huge", "tiny", "patterns", "zeros"]
    for number, kind in enumerate(kinds):
        length = 150 if number == 0 else 40
        x, y = FINITE[kind]((3, length), number), FINITE[kinds[-number]]((2, length), number + 50)
        assert_same_product(x, y, PAIRS[name])


@pytest.mark.parametrize(("left", "right"), [(E5M2, E5M2), (E5M2, E4M3), (E4M3, E2M1), (INT8, E5M2)])
def test_sums_of_a_segment_are_exact_and_rounded_once(left, right):
    """Elements of any size cancel down to the smallest: up to 71 bits in a sum, which fp64 cannot hold."""
    codes = [torch.randint(0, e.max_code + 1, (4, 128)).to(torch.uint8) for e in (left, right)]
    a, b = (decode(c, e).double() for c, e in zip(codes, (left, right), strict=True))
    a[0, :64], b[0] = a[0, 64:], torch.cat((b[0, :64], -b[0, :64]))
    a[0, 63] = 2.0**left.step_exponent
    found = matmul_reference._dot(a, b.t())
    exact = [
        [sum(Fraction(x) * Fraction(y) for x, y in zip(r, s, strict=True)) for s in b.tolist()]
        for r in a.tolist()
    ]
    assert found.tolist() == [[float(total) for total in row] for row in exact]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8 and mxfp4", "fp8 per tensor"])
def test_output_dtypes_and_bias_equal_the_oracle(name, dtype):
    x, y = FINITE["normal"]((4, 33), 1), FINITE["spread"]((5, 33), 2)
    for bias in (
        None,
        FINITE["normal"]((1, 5), 3)[0],
        torch.full((5,), 1e30),
        FINITE["normal"]((1, 5), 4)[0].bfloat16(),
    ):
        assert_same_product(x, y, PAIRS[name], dtype, bias)


@pytest.mark.parametrize("kind", NON_FINITE)
@pytest.mark.parametrize(
    "name", ["nvfp4", "mxfp4", "double", "ue5m3 and nvfp4", "fp8 in blocks", "fp8 per tensor"]
)
def test_a_poisoned_row_gives_nan_where_the_oracle_does(name, kind):
    x, y = NON_FINITE[kind]((18, 40), 1), FINITE["normal"]((3, 40), 2)
    nan = sum(FP32.is_nan(p) for row in assert_same_product(x, y, PAIRS[name]) for p in row)
    assert (nan > 0) == (kind != "overflows_bf16")
    assert_same_product(y, x, PAIRS[name])


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8-e5m2", "fp8 per tensor"])
def test_a_product_over_nothing_is_the_bias(name):
    bias = FINITE["normal"]((1, 2), 1)[0]
    for given in (None, bias):
        out = assert_same_product(torch.zeros(3, 0), torch.zeros(2, 0), PAIRS[name], torch.float32, given)
        assert out == [[0, 0] if given is None else patterns(bias.reshape(1, 2))[0]] * 3
    assert assert_same_product(torch.zeros(0, 16), torch.zeros(2, 16), PAIRS[name]) == []


def test_cancellation_leaves_the_exact_remainder():
    """Large terms cancel and one product of the smallest codes remains."""
    x = torch.zeros(2, 64)
    x[:, 0], x[:, 16], x[0, 32] = 6.0, 6.0, 6e-4
    y = x.clone()
    y[:, 16] = -6.0
    product = assert_same_product(x, y, (Spec(), Spec()))
    assert product[0][0] != 0
    assert product[1][1] == 0


def test_a_segment_of_e5m2_and_e4m3_that_fp64_cannot_hold_is_rounded_to_nearest():
    """57344 * 448 many times and 2^-16 * 2^-9 once: 57 bits."""
    x, y = torch.ones(1, 128), torch.ones(1, 128)
    x[0, 5], y[0, 5] = 2.0**-16 / 57344, 2.0**-9 / 448
    x[0, 9], y[0, 9] = 0.0, 0.0
    assert_same_product(x, y, (Spec(format="fp8-e5m2", block=(0, 0)), Spec(format="fp8", block=(0, 0))))


def test_global_scales_are_applied_one_after_the_other():
    """Their product alone overflows or vanishes, the result does not."""
    for left, right in [(1e-30, 1e30), (1e30, 1e-30), (3e-38, 3e38), (1e-20, 1e-20)]:
        assert_same_product(
            FINITE["normal"]((2, 16), 1) * left, FINITE["normal"]((2, 16), 2) * right, PAIRS["nvfp4"]
        )
