"""Three opinions on every codec: the product's, the oracle's, and those of ml_dtypes and gfloat."""

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourbits.formats.codes import decode, encode
from fourbits.formats.descriptors import E8M0, ELEMENT_FORMATS
from oracle.bridge import patterns, tensor
from oracle.floats import FP32
from oracle.grids import GRIDS, Grid

PRODUCT = {fmt.name.upper(): fmt for fmt in [*ELEMENT_FORMATS.values(), E8M0]}
ELEMENTS = [grid for grid in GRIDS.values() if grid.name != "E8M0"]
PEERS = {
    "E2M1": (ml_dtypes.float4_e2m1fn, gfloat.formats.format_info_ocp_e2m1),
    "E4M3": (ml_dtypes.float8_e4m3fn, gfloat.formats.format_info_ocp_e4m3),
    "E5M2": (ml_dtypes.float8_e5m2, gfloat.formats.format_info_ocp_e5m2),
}


def near_the_grid(grid: Grid) -> list[int]:
    """fp32 patterns of every magnitude and midpoint of a grid, and their neighbours on both sides."""
    middles = [(a + b) / 2 for a, b in zip(grid.magnitudes, grid.magnitudes[1:], strict=False)]
    exact = [FP32.of(value) for value in [*grid.magnitudes, *middles]]
    around = {max(p + step, 0) for p in exact for step in (-1, 0, 1)}
    return sorted(p for p in around if FP32.is_finite(p))


def with_signs(grid: Grid, magnitudes: list[int]) -> list[int]:
    return magnitudes if grid.layout == "unsigned" else magnitudes + [FP32.neg(p) for p in magnitudes]


@pytest.mark.parametrize("grid", ELEMENTS, ids=lambda g: g.name)
def test_the_product_encodes_as_the_oracle_around_every_tie(grid):
    values = with_signs(grid, [*near_the_grid(grid), FP32.largest, FP32.inf, 1])
    assert encode(tensor([values])[0], PRODUCT[grid.name]).tolist() == [grid.nearest(p) for p in values]


@pytest.mark.parametrize("grid", ELEMENTS, ids=lambda g: g.name)
@given(magnitude=st.integers(0, FP32.inf))
def test_the_product_encodes_as_the_oracle_for_any_pattern(grid, magnitude):
    values = with_signs(grid, [magnitude])
    assert encode(tensor([values])[0], PRODUCT[grid.name]).tolist() == [grid.nearest(p) for p in values]


@pytest.mark.parametrize("grid", GRIDS.values(), ids=lambda g: g.name)
def test_the_product_decodes_every_code_as_the_oracle(grid):
    codes = torch.arange(1 << grid.bits, dtype=torch.int32).to(torch.uint8)
    assert patterns(decode(codes, PRODUCT[grid.name])[None])[0] == [grid.decode(c) for c in codes.tolist()]


@pytest.mark.parametrize("name", PEERS)
def test_the_oracle_encodes_as_ml_dtypes_and_gfloat_up_to_the_largest_magnitude(name):
    grid, (dtype, info) = GRIDS[name], PEERS[name]
    limit = FP32.of(grid.largest)
    values = [p for p in with_signs(grid, near_the_grid(grid)) if FP32.abs(p) <= limit]
    numbers = np.array(values, dtype=np.uint32).view(np.float32)
    codes = [grid.nearest(p) for p in values]
    assert numbers.astype(dtype).view(np.uint8).tolist() == codes
    rounded = [gfloat.round_float(info, float(number)) for number in numbers]
    assert [gfloat.encode_float(info, number) for number in rounded] == codes


def test_the_oracle_places_a_value_below_the_smallest_exponent_of_e8m0_at_it():
    assert [GRIDS["E8M0"].nearest(p) for p in (0, 1, FP32.of(1), FP32.of(3), FP32.largest)] == [
        0,
        0,
        127,
        128,
        254,
    ]
