"""Frequencies of stochastic rounding against the probabilities of docs/nvfp4.md, sections 7.6 and 10."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from fourbits.quant.tensor import QuantizedTensor
from oracle.noise import key_of
from oracle.spec import Spec
from oracle.transform import signs
from support.agreement import by_fourbits

CHUNKS, CHUNK = 16, 256
ROWS = CHUNKS * CHUNK
FIVE_SIGMA = 5.0


def quantized(block: Tensor, spec: Spec, amax: float) -> list[QuantizedTensor]:
    """ROWS rows, all equal to block [16], with fresh bits in every row; in pieces, as ranks would do it."""
    x = block.expand(CHUNK, 16)
    return [by_fourbits(x, spec, amax=amax, sr_key=(77, 12, 3, CHUNK * i, 0)) for i in range(CHUNKS)]


def rounded(values: list[float], spec: Spec, amax: float) -> Tensor:
    """The same, dequantized: fp32 [ROWS, 16]."""
    return torch.cat([q.dequantize(torch.float32) for q in quantized(torch.tensor(values), spec, amax)])


def assert_frequency(up: Tensor, p: Fraction) -> None:
    """The share of True is p, up to five standard deviations of a Bernoulli mean; exactly for p = 0 and 1."""
    share, bound = up.double().mean().item(), FIVE_SIGMA * math.sqrt(float(p * (1 - p)) / up.numel())
    assert abs(share - float(p)) <= bound


@pytest.mark.parametrize("v", [2.3, 0.1, 0.499, 3.999, 4.02, 1.0, 5.99, 2.5])
@pytest.mark.parametrize("rounding", ["sr", "sr32"])
def test_values_go_up_as_often_as_their_bits_say(rounding, v):
    """amax 6 and a 6 in the block: multiplier 1, so that v meets the grid as it is."""
    out = rounded([6.0] + [v] * 15, Spec(rounding=rounding), 6.0)[:, 1:]
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    low = max(g for g in grid if g <= v)
    high = min([g for g in grid if g > v])
    f = (Fraction(torch.tensor(v).item()) - Fraction(low)) / (Fraction(high) - Fraction(low))
    p = Fraction(math.floor(256 * f), 256) if rounding == "sr" else Fraction(math.ceil(f * 2**24), 2**24)
    assert_frequency(out > (low + high) / 2, p)
    assert set((2 * out).round().unique().tolist()) <= {2 * low, 2 * high}


def test_the_mean_of_a_rounded_block_is_the_block_with_headroom():
    """sr32 with headroom on is unbiased for every element, block maxima included."""
    x = [1.0, -0.77, 0.123, 0.45, -0.61, 0.333, 0.02, -0.91, 0.99, 0.5, -0.25, 0.7, 0.05, -0.06, 0.81, 1.0]
    out = rounded(x, Spec(rounding="sr32", sr_headroom=True), 3.1).double()
    error = (out.mean(0) - torch.tensor(x).double()).abs()
    bound = FIVE_SIGMA * out.std(0) / math.sqrt(ROWS) + 1e-6
    assert (error <= bound).all()


def test_without_headroom_a_block_maximum_whose_scale_rounds_down_is_biased_low():
    """The reason for headroom: values above 6 have nowhere to go."""
    x = [0.9] + [0.1] * 15
    p = 0.9 * 448 / 3.1
    assert 128 < p < 132  # rounds down to 128, so that the maximum meets the grid above 6
    out = rounded(x, Spec(rounding="sr32"), 3.1)[:, 0].double()
    assert out.std() == 0
    assert out[0] < 0.9 * 0.99


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_stochastic_block_scales_go_up_as_often_as_their_distance_says(share):
    """The scale lies between its neighbours 256 and 288."""
    p = 256 + 32 * share
    maximum = p * 6 / 448
    block = torch.tensor([maximum] + [0.0] * 15)
    pieces = quantized(block, Spec(scale_rounding="sr"), 6.0)
    scales = torch.cat([q.block_scale.to(torch.float32)[:, 0] for q in pieces])
    assert set(scales.tolist()) == {256.0, 288.0}
    exact = Fraction(torch.tensor(maximum).item()) * 448 / 6
    assert_frequency(scales == 288.0, (exact - 256) / 32)


def test_neighbouring_elements_blocks_rows_and_steps_round_independently():
    """Correlation of the decisions of any two streams is below five standard deviations of zero."""
    x = torch.full((256, 64), 2.5)
    x[:, ::16] = 6.0
    keep = torch.arange(64) % 16 != 0
    up = [
        (
            by_fourbits(x, Spec(rounding="sr"), amax=6.0, sr_key=key).dequantize(torch.float32)[:, keep] > 2.5
        ).double()
        for key in [(1, 0, 0, 0, 0), (1, 0, 1, 0, 0), (1, 1, 0, 0, 0), (2, 0, 0, 0, 0)]
    ]
    base = 2 * up[0] - 1
    pairs = [(base, 2 * other - 1) for other in up[1:]]
    pairs += [(base[1:], base[:-1]), (base[:, 1:], base[:, :-1]), (base[:, 15:], base[:, :-15])]
    for first, second in pairs:
        assert (first * second).mean().abs() < FIVE_SIGMA / math.sqrt(first.numel())


def test_ms_eden_keeps_the_length_that_nearest_rounding_does_not():
    """The mean over draws, rotated back and projected on x, is 1 - 5e-4 at worst (decision N 15)."""
    n, x = 32, torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    spec = Spec(rounding="ms-eden", rht=n, rht_signs="per-call")
    hadamard = (
        torch.tensor([[1.0 - 2 * ((i & j).bit_count() % 2) for j in range(n)] for i in range(n)]) / n**0.5
    )
    shares = []
    for step in range(200):
        key = (9, 4, step, 0, 0)
        minus = torch.tensor(signs("per-call", n, key_of(key)))
        rotated = by_fourbits(x, spec, sr_key=key).dequantize(torch.float32).reshape(-1, n) @ hadamard
        back = torch.where(minus, -rotated, rotated).reshape(x.shape)
        shares.append((back * x).sum() / (x * x).sum())
    share = torch.stack(shares).double()
    assert (share.mean() - 1).abs() < 5e-4 + FIVE_SIGMA * share.std() / len(shares) ** 0.5
    plain = by_fourbits(x, Spec()).dequantize(torch.float32)
    assert ((plain * x).sum() / (x * x).sum() - 1).abs() > 2e-3
