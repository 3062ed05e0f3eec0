"""The product of two operands: the exact-sum reference, and the emulated product within its bound."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from fourbits.gemm.cpu import matmul as matmul_emulated
from fourbits.gemm.matmul import matmul
from fourbits.gemm.reference import matmul as matmul_reference
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.quant.tensor import QuantizedTensor, unpacked
from support.assertions import assert_same_bytes

HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
SPECS = {
    "nvfp4": OperandSpec(),
    "nvfp4-16x16": OperandSpec(block=(16, 16)),
    "nvfp4-rht": OperandSpec(rht=16),
    "nve1m2": OperandSpec(format="nve1m2"),
    "nvint4": OperandSpec(format="nvint4"),
    "nvfp4-double": OperandSpec(format="nvfp4-double"),
    "nvfp4-ue5m3": OperandSpec(format="nvfp4-ue5m3"),
    "mxfp4": OperandSpec(format="mxfp4"),
    "mxfp8": OperandSpec(format="mxfp8"),
    "fp8-tensor": OperandSpec(format="fp8", block=(0, 0)),
    "fp8-1x128": OperandSpec(format="fp8", block=(1, 128)),
    "fp8-128x128": OperandSpec(format="fp8", block=(128, 128)),
    "bf16": OperandSpec(format="bf16"),
    "fp32": OperandSpec(format="fp32"),
}
PLAIN = [name for name in SPECS if not name.endswith("-rht")]


def spread_scales(rows: int, length: int) -> Tensor:
    """Blocks whose magnitudes span the range of a block scale: 2^0 to 2^-15 of the largest."""
    exponents = -torch.randint(0, 16, (rows, -(-length // 16))).float()
    return torch.randn(rows, length) * exponents.exp2().repeat_interleave(16, 1)[:, :length]


def cancelling(rows: int, length: int) -> Tensor:
    """Each half of a row is nearly the negative of the other, so that a sum is small against its terms."""
    half = torch.randn(rows, length // 2) * 100
    return (
        torch.cat((half, -half, torch.full((rows, length % 2), 1e-3)), 1) + torch.randn(rows, length) * 1e-2
    )


DATA = {"gaussian": torch.randn, "spread scales": spread_scales, "cancelling": cancelling}


def assert_within_the_bound(actual: Tensor, a: QuantizedTensor, b: QuantizedTensor) -> None:
    """docs/nvfp4.md, section 12.4; the reference is the fp64 product of values that fp64 holds exactly."""
    expected = matmul_reference.matmul(a, b, torch.float32, None).double()
    sums = a.dequantize().double().abs() @ b.dequantize().double().abs().t()
    bound = max(16, a.codes.shape[1] * 2) * 2.0**-23 * sums
    bound = bound + HALF_ULP[actual.dtype] * (expected.abs() + bound) + SMALLEST[actual.dtype] / 2
    assert bool(((actual.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", SPECS)
def test_the_emulated_product_is_within_the_bound_of_the_exact_sum(name, data):
    a = quantize(DATA[data](19, 300), SPECS[name])
    for other in {name} if SPECS[name].rht else {name, "nvfp4", "fp8-1x128", "fp32"}:
        b = quantize(DATA[data](21, 300), SPECS[other])
        assert_within_the_bound(matmul(a, b, torch.float32), a, b)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_results_are_rounded_once(name, out_dtype):
    a, b = quantize(torch.randn(19, 300), SPECS[name]), quantize(torch.randn(21, 300), SPECS[name])
    assert_within_the_bound(matmul(a, b, out_dtype), a, b)


def test_the_exact_sum_is_the_sum_of_rational_numbers_rounded_once():
    a, b = quantize(cancelling(3, 64), SPECS["nvfp4"]), quantize(spread_scales(2, 64), SPECS["nvfp4"])
    ones = torch.ones(())
    total = matmul_reference.matmul(
        with_global_scale(a, ones), with_global_scale(b, ones), torch.float32, None
    )
    rows_a, rows_b = a.block_values().tolist(), b.block_values().tolist()
    for i, row_a in enumerate(rows_a):
        for j, row_b in enumerate(rows_b):
            exact = sum(Fraction(p) * Fraction(q) for p, q in zip(row_a, row_b, strict=True))
            rounded = torch.tensor(float(exact), dtype=torch.float64).to(torch.float32)
            assert total[i, j] == rounded


def with_global_scale(q: QuantizedTensor, scale: Tensor) -> QuantizedTensor:
    return QuantizedTensor(q.codes, q.block_scale, scale, q.axis, q.shape, q.spec)


def test_scales_are_applied_one_after_the_other_because_their_product_may_underflow():
    """S_a * S_b = 2^-160 is no fp32 number, (sum * S_a) * S_b is."""
    q = quantize(torch.full((16, 16), 6.0), SPECS["nvfp4"])
    a = with_global_scale(q, torch.tensor(2.0**-80))
    total = 16 * (6 * 448) ** 2
    for multiply in (matmul_reference.matmul, emulated):
        y = multiply(a, a, torch.float32, None)
        assert torch.equal(y, torch.full((16, 16), total * 2.0**-160))
        assert y[0, 0] > 0


def emulated(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    return matmul_emulated.matmul(unpacked(a), unpacked(b), out_dtype, bias)


def test_the_bias_is_added_in_fp32_before_the_only_rounding():
    """256 + 1 + 1: BF16 rounds 257 to 256, so a bias added to a rounded sum would be lost."""
    a = quantize(torch.eye(16) * 257 / 257, SPECS["fp32"])
    b = quantize(torch.eye(16) * 257, SPECS["fp32"])
    bias = torch.ones(16, dtype=torch.bfloat16)
    for multiply in (matmul_reference.matmul, emulated):
        diagonal = multiply(a, b, torch.bfloat16, bias).diagonal()
        assert torch.equal(diagonal, torch.full((16,), 258.0, dtype=torch.bfloat16))
    assert matmul(a, b, torch.float16, bias).dtype == torch.float16


@pytest.mark.parametrize("name", PLAIN)
def test_a_nan_scale_poisons_its_row_and_column_and_nothing_else(name):
    x, w = torch.randn(40, 144), torch.randn(40, 144)
    x[3, 20] = torch.inf
    w[37, 100] = torch.nan
    a, b = quantize(x, SPECS[name]), quantize(w, SPECS[name])
    nan_rows = ~torch.isfinite(a.dequantize()).all(1)
    nan_columns = ~torch.isfinite(b.dequantize()).all(1)
    assert bool(nan_rows[3])
    assert bool(nan_columns[37])
    expected = nan_rows[:, None] | nan_columns[None, :]
    for y in (matmul(a, b), matmul_reference.matmul(a, b, torch.float32, None)):
        assert torch.equal(~torch.isfinite(y), expected)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 32), (5, 0, 32), (3, 4, 0), (0, 0, 0)])
def test_a_product_over_nothing_is_the_bias(name, m, n, k):
    a, b = quantize(torch.randn(m, k), SPECS[name]), quantize(torch.randn(n, k), SPECS[name])
    bias = torch.randn(n)
    expected = bias.expand(m, n) if k == 0 else torch.zeros(m, n)
    for multiply in (matmul_reference.matmul, emulated):
        assert torch.equal(multiply(a, b, torch.float32, bias), expected)
        assert torch.equal(multiply(a, b, torch.bfloat16, None), torch.zeros(m, n, dtype=torch.bfloat16))


def test_operands_that_sum_over_different_lengths_are_refused():
    x = torch.randn(32, 48)
    with pytest.raises(ValueError, match=r"equal contraction sizes, got 48 .* and 32 .*Quantize both along"):
        matmul(quantize(x, SPECS["nvfp4"], axis=1), quantize(x, SPECS["nvfp4"], axis=0))


@pytest.mark.parametrize("other", [OperandSpec(), OperandSpec(rht=32), OperandSpec(rht=16, rht_signs="none")])
def test_transforms_that_do_not_cancel_are_refused(other):
    x = torch.randn(32, 32)
    with pytest.raises(ValueError, match=r"the same transform.*te16.*Give both operands"):
        matmul(quantize(x, OperandSpec(rht=16)), quantize(x, other))


def test_autocast_changes_no_bit_of_a_product():
    a, b = quantize(torch.randn(32, 64), SPECS["nvfp4"]), quantize(torch.randn(32, 64), SPECS["nvfp4"])
    with torch.autocast("cpu", torch.bfloat16):
        inside = matmul(a, b, torch.float32)
    assert_same_bytes(inside, matmul(a, b, torch.float32))


def test_an_operand_stored_along_axis_0_multiplies_like_its_transpose_along_axis_1():
    x = torch.randn(48, 32)
    along_0 = quantize(x, OperandSpec(rht=16), axis=0)
    along_1 = quantize(x.t(), OperandSpec(rht=16), axis=1)
    b = quantize(torch.randn(16, 48), OperandSpec(rht=16))
    assert_same_bytes(matmul(along_0, b, torch.float32), matmul(along_1, b, torch.float32))


@pytest.mark.parametrize("name", ["b", "bias", "alpha"])
def test_tensors_on_several_devices_are_refused(name):
    a, b = (quantize(torch.ones(16, 16), OperandSpec()) for _ in range(2))
    away = torch.device("meta")
    if name == "b":
        b = replace(b, codes=b.codes.to(away))
    alpha = torch.ones((), device=away) if name == "alpha" else None
    bias = torch.zeros(16, device=away) if name == "bias" else None
    with pytest.raises(ValueError, match=f"{name} must be on a's device, cpu, got meta"):
        matmul(a, b, bias=bias, sums="exact", alpha=alpha)


@pytest.mark.parametrize("name", PLAIN)
def test_operands_without_data_multiply_to_a_shape(name):
    """As layers do on the meta device, where a model is planned before it has memory."""
    a, b = (quantize(torch.empty(rows, 48, device="meta"), SPECS[name]) for rows in (32, 16))
    made = matmul(a, b, torch.float32)
    assert (made.shape, made.dtype, made.device.type) == ((32, 16), torch.float32, "meta")
