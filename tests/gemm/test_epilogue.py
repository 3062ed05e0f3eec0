"""Global scales near the ends of FP32: a finite result is right, and no other bit changes."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from fourbits.gemm.cpu import matmul as plain
from fourbits.gemm.reference.matmul import balanced, finish, matmul
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.quant.tensor import unpacked

#: magnitudes of two operands whose product is in range, although one scale takes the sum out of it
FAR_APART = [(3e38, 1e-38), (1e-38, 3e38), (1e31, 1e-31), (2e37, 3e-36), (1e-36, 1e34)]
SPECS = {"nvfp4": OperandSpec(), "fp8 whole": OperandSpec(format="fp8", block=(0, 0))}


def grid(rows: int, length: int, seed: int) -> Tensor:
    return torch.randn(rows, length, generator=torch.Generator().manual_seed(seed)).abs()


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("large", "small"), FAR_APART)
def test_a_finite_result_of_far_apart_operands_is_finite_and_right(name, large, small):
    """One sign, so that the sum does not cancel; 12.4 bounds the error by c * 2^-23 of it."""
    a, b = grid(16, 1024, 1), grid(16, 1024, 2)
    a, b = (x / x.max() * magnitude for x, magnitude in ((a, large), (b, small)))
    left, right = (quantize(x, SPECS[name]) for x in (a, b))
    true = left.dequantize().double() @ right.dequantize().double().t()
    assert torch.isfinite(true.float()).all()
    results = [matmul(left, right, torch.float32, None)]
    results.append(plain.matmul(unpacked(left), unpacked(right), torch.float32, None))
    for result in results:
        assert (result.double() - true).abs().max() <= 1024 * 2.0**-23 * true.max()


def one_after_the_other(total: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return (total * scale_a) * scale_b


def test_the_sum_times_one_scale_alone_would_leave_the_range():
    """What the balance prevents: without it the test above fails."""
    total, a, b = torch.tensor(7e6 * 1024), torch.tensor(3e38 / 2688), torch.tensor(1e-38 / 2688)
    assert one_after_the_other(total, a, b).isinf()
    true = Fraction(total.item()) * Fraction(a.item()) * Fraction(b.item())
    assert abs(Fraction(finish(total, a, b, torch.float32, None).item()) / true - 1) <= Fraction(1, 2**22)


def scalars(seed: int, low: float, high: float, count: int) -> Tensor:
    """Random mantissas and exponents in [low, high)."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.empty(count).uniform_(low, high, generator=generator).floor()
    return torch.ldexp(1 + torch.rand(count, generator=generator), exponents)


def test_no_bit_changes_where_the_first_product_is_normal():
    """Random scales and sums, subnormal results included."""
    a, b, total = scalars(1, -126, 127, 40_000), scalars(2, -126, 127, 40_000), scalars(3, -20, 40, 40_000)
    expected, first = one_after_the_other(total, a, b), total * a
    normal = first.isfinite() & (first >= torch.finfo(torch.float32).tiny)
    pairs = [balanced(x, y) for x, y in zip(a, b, strict=True)]
    left, right = (torch.stack(side) for side in zip(*pairs, strict=True))
    found = one_after_the_other(total, left, right)
    assert normal.sum() > 20_000
    assert (expected[normal] > 0).sum() > 10_000
    assert torch.equal(bits(found[normal]), bits(expected[normal]))


EDGES = [0.0, 1e-45, 1.1754943508222875e-38, 1.0, 3.4028234663852886e38, float("inf"), float("nan")]


@pytest.mark.parametrize("move", [lambda a, b: (a, b), lambda a, b: (b, a)], ids=["a, b", "b, a"])
@pytest.mark.parametrize("first", EDGES)
def test_scales_at_the_edges_of_fp32_have_the_exact_product(first, move: Callable[..., tuple[float, float]]):
    for second in EDGES:
        a, b = move(first, second)
        left, right = (x.double() for x in balanced(torch.tensor(a), torch.tensor(b)))
        torch.testing.assert_close(
            left * right, torch.tensor(a).double() * torch.tensor(b).double(), rtol=0, atol=0, equal_nan=True
        )
