"""Rounding counts: over all noise, a value goes up exactly as often as the specification says."""

import math
from fractions import Fraction

import pytest
import torch

from exact_grids import FLOATS, INTEGERS, magnitudes
from fourbits.formats.descriptors import E4M3, ELEMENT_FORMATS
from fourbits.formats.rounding import round_nearest, round_stochastic, round_stochastic_32

NAMES = [*FLOATS, *INTEGERS]
ALL_BYTES = torch.arange(256)


def between(name: str, count: int = 400) -> list[tuple[float, Fraction, Fraction]]:
    """Magnitudes with their lower neighbour on the grid and the step to the next."""
    grid, generator = magnitudes(name), torch.Generator().manual_seed(5)
    places = torch.randint(len(grid) - 1, (count,), generator=generator).tolist()
    shares = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    cases = []
    for place, share in zip(places, shares, strict=True):
        low, high = grid[place], grid[place + 1]
        value = torch.tensor(float(low + (high - low) * Fraction(share)), dtype=torch.float32).item()
        if Fraction(value) < high:
            cases.append((value, low, high - low))
    return cases


@pytest.mark.parametrize("name", NAMES)
def test_eight_bits_go_up_for_floor_256_f_of_the_256_bytes(name):
    cases = between(name)
    values = torch.tensor([value for value, _, _ in cases])
    rounded = round_stochastic(values[:, None], ALL_BYTES, ELEMENT_FORMATS[name])
    for result, (value, low, step) in zip(rounded, cases, strict=True):
        ups = math.floor(256 * (Fraction(value) - low) / step)
        assert set(result.tolist()) <= {float(low), float(low + step)}
        assert int((result > float(low)).sum()) == ups, value
        assert bool((result[256 - ups :] > float(low)).all()), "the largest bytes go up"


@pytest.mark.parametrize("name", NAMES)
def test_24_bits_go_up_exactly_below_f(name):
    cases = between(name)
    values = torch.tensor([value for value, _, _ in cases])
    thresholds = torch.tensor([math.ceil((Fraction(v) - low) / step * 2**24) for v, low, step in cases])
    for offset, goes_up in ((-1, True), (0, False)):
        word = ((thresholds + offset) << 8) + 255  # the low eight bits do not count
        possible = (thresholds + offset >= 0) & (thresholds + offset < 2**24)
        rounded = round_stochastic_32(values, word, ELEMENT_FORMATS[name])
        signed = word.to(torch.int32)  # the same 32 bits as a signed word
        assert torch.equal(round_stochastic_32(values, signed, ELEMENT_FORMATS[name]), rounded)
        expected = torch.tensor([float(low + step if goes_up else low) for _, low, step in cases])
        assert torch.equal(rounded[possible], expected[possible])
    assert possible.sum() > 300


@pytest.mark.parametrize("name", NAMES)
def test_values_on_the_grid_never_move_and_larger_ones_saturate(name):
    fmt = ELEMENT_FORMATS[name]
    grid = torch.tensor([float(m) for m in magnitudes(name)])
    assert torch.equal(round_nearest(grid, fmt), grid)
    assert torch.equal(round_stochastic(grid[:, None], ALL_BYTES, fmt), grid[:, None].expand(-1, 256))
    words = torch.tensor([0, 0xFFFFFFFF, 0x80000000, 255])
    assert torch.equal(round_stochastic_32(grid[:, None], words, fmt), grid[:, None].expand(-1, 4))
    beyond = torch.tensor([1.01 * fmt.max_value, 3e38, torch.inf])
    for rounded in (
        round_nearest(beyond, fmt),
        round_stochastic(beyond, torch.tensor(255), fmt),
        round_stochastic_32(beyond, torch.tensor(0), fmt),
    ):
        assert rounded.tolist() == [fmt.max_value] * 3


def test_e4m3_keeps_subnormals_and_clamps_before_the_cast():
    values = torch.tensor([2.0**-9, 2.0**-10, 1.0001 * 2.0**-10, 464.0, 464.001, 1e9])
    assert round_nearest(values, E4M3).tolist() == [2.0**-9, 0.0, 2.0**-9, 448.0, 448.0, 448.0]
