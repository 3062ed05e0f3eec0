"""SR is unbiased up to a block's largest code and shrinks what lies above: docs/nvfp4.md, section 7.6."""

import math

import pytest
import torch
from torch import Tensor

from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.quant.tensor import QuantizedTensor, decode_scales, spread

KEY = torch.tensor([1, 2, 3, 0, 0])
CLIPPING = {"mxfp4": OperandSpec(format="mxfp4", rounding="sr32"), "nvfp4": OperandSpec(rounding="sr32")}
WITHOUT = {
    "mxfp4 ceil": OperandSpec(format="mxfp4", rounding="sr32", scale_rule="ceil"),
    "nvfp4 headroom": OperandSpec(rounding="sr32", sr_headroom=True),
}
#: per cent of a Gaussian gradient, as the document states them
STATED = {"mxfp4": 1.04, "nvfp4": 0.34}


def gaussian() -> Tensor:
    return torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0))


def steps(q: QuantizedTensor, shape: torch.Size) -> Tensor:
    """The scale of every element."""
    scale = spread(decode_scales(q.block_scale, q.spec.block_format), q.spec.block_size, tuple(shape))
    return scale * q.global_scale


def shrinkage(x: Tensor, y: Tensor) -> float:
    """1 - <x, y> / <x, x>: by how much a step along the gradient is shorter."""
    return 1 - float((x.double() * y.double()).sum() / x.double().square().sum())


def expectation(x: Tensor, q: QuantizedTensor) -> Tensor:
    """The mean of SR over its random bits: x, and the largest code where x is above it."""
    return x.sign() * torch.minimum(x.abs(), 6 * steps(q, x.shape))


@pytest.mark.parametrize("name", CLIPPING)
def test_clipped_maxima_shrink_a_gaussian_as_stated(name):
    """Blocks are independent: 100 parts give the standard error; five of them, and the rounding."""
    x = gaussian()
    q = quantize(x, CLIPPING[name], 1, sr_key=KEY)
    mean = expectation(x, q)
    parts = [shrinkage(a, b) for a, b in zip(x.tensor_split(100), mean.tensor_split(100), strict=True)]
    error = float(torch.tensor(parts, dtype=torch.float64).std()) / math.sqrt(len(parts))
    assert abs(100 * shrinkage(x, mean) - STATED[name]) <= 500 * error + 0.005


@pytest.mark.parametrize("name", [*CLIPPING, *WITHOUT])
def test_what_is_drawn_has_the_stated_expectation(name):
    """SR of a step s has a variance of at most s^2 / 4 per element; five deviations of the sum."""
    x = gaussian()
    q = quantize(x, (CLIPPING | WITHOUT)[name], 1, sr_key=KEY)
    widest = 2 * steps(q, x.shape).double()  # codes 4 and 6 are two apart
    deviation = (x.double().square() * widest.square() / 4).sum().sqrt() / x.double().square().sum()
    difference = shrinkage(x, q.dequantize()) - shrinkage(x, expectation(x, q))
    assert abs(difference) <= 5 * deviation


@pytest.mark.parametrize("name", WITHOUT)
def test_no_maximum_is_clipped_by_a_scale_rounded_up_or_with_headroom(name):
    x = gaussian()
    q = quantize(x, WITHOUT[name], 1, sr_key=KEY)
    assert torch.equal(expectation(x, q), x)


def test_eight_random_bits_shrink_by_at_most_a_256th_of_a_step():
    """They truncate the position between two codes to 1/256, so that a mean is low by at most that."""
    x = gaussian()
    rough, fine = (
        quantize(x, OperandSpec(format="mxfp4", rounding=rounding, scale_rule="ceil"), 1, sr_key=KEY)
        for rounding in ("sr", "sr32")
    )
    extra = shrinkage(x, rough.dequantize()) - shrinkage(x, fine.dequantize())
    bound = float(
        (x.abs().double() * 2 * steps(rough, x.shape).double()).sum() / 256 / x.double().square().sum()
    )
    assert 0 < extra <= bound
