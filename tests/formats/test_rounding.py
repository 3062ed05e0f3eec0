"""Rounding counts: over all noise, a value goes up exactly as often as the specification says."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fourbits.formats.descriptors import E4M3, ELEMENT_FORMATS
from fourbits.formats.rounding import round_nearest, round_stochastic, round_stochastic_32
from support.exact_grids import FLOATS, INTEGERS, magnitudes

NAMES = [*FLOATS, *INTEGERS]
ALL_BYTES = torch.arange(256)
PLACES, SHARES = st.integers(0, 255), st.floats(0, 1, exclude_max=True)


def between(name: str, place: int, share: float) -> tuple[float, Fraction, Fraction]:
    """An fp32 magnitude below the largest, its lower neighbour on the grid and the step to the next."""
    grid = magnitudes(name)
    low, high = grid[place % (len(grid) - 1) :][:2]
    value = torch.tensor(float(low + (high - low) * Fraction(share)), dtype=torch.float32).item()
    assume(Fraction(value) < high)
    return value, low, high - low


@pytest.mark.parametrize("name", NAMES)
@given(place=PLACES, share=SHARES)
def test_eight_bits_go_up_for_floor_256_f_of_the_256_bytes(name, place, share):
    value, low, step = between(name, place, share)
    rounded = round_stochastic(torch.tensor(value), ALL_BYTES, ELEMENT_FORMATS[name])
    ups = math.floor(256 * (Fraction(value) - low) / step)
    assert rounded[: 256 - ups].tolist() == [float(low)] * (256 - ups)
    assert rounded[256 - ups :].tolist() == [float(low + step)] * ups, "the largest bytes go up"


@pytest.mark.parametrize("name", NAMES)
@given(place=PLACES, share=SHARES)
def test_24_bits_go_up_exactly_below_f(name, place, share):
    value, low, step = between(name, place, share)
    threshold = math.ceil((Fraction(value) - low) / step * 2**24)
    places = [n for n in (0, threshold - 1, threshold, 2**24 - 1) if 0 <= n < 2**24]
    words = torch.tensor([(n << 8) + low_bits for n in places for low_bits in (0, 255)])  # which do not count
    expected = [float(low + step if n < threshold else low) for n in places for _ in range(2)]
    for word in (words, words.to(torch.int32)):  # the same 32 bits as signed words
        assert round_stochastic_32(torch.tensor(value), word, ELEMENT_FORMATS[name]).tolist() == expected


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
