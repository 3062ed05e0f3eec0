"""Codecs against the formula of the specification, and against ml_dtypes and gfloat."""

import itertools
from fractions import Fraction

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch

from fourbits.formats.codes import decode, encode
from fourbits.formats.descriptors import E2M1, E4M3, E5M2, E8M0, ELEMENT_FORMATS, UE5M3
from support.assertions import assert_same_bytes
from support.exact_grids import FLOATS, INTEGERS, code, magnitudes, nearest
from support.recorded import recorded

NAMES = [*FLOATS, *INTEGERS]


def all_codes(bits=8):
    return torch.arange(1 << bits, dtype=torch.int32).to(torch.uint8)


def around(values: list[Fraction]) -> torch.Tensor:
    """Each value and four fp32 neighbours on either side, with both signs."""
    exact = torch.tensor([float(value) for value in values], dtype=torch.float32)
    neighbours = (exact.view(torch.int32)[:, None] + torch.arange(-4, 5, dtype=torch.int32)).clamp_min(0)
    positive = neighbours.flatten().view(torch.float32)
    return torch.cat((positive, -positive))


def test_the_table_of_element_formats_is_the_one_specified():
    assert list(ELEMENT_FORMATS) == ["e2m1", "e1m2", "int4", "int8", "e4m3", "e5m2", "ue5m3"]


@pytest.mark.parametrize("name", NAMES)
def test_every_magnitude_decodes_to_the_formula(name):
    fmt, grid = ELEMENT_FORMATS[name], magnitudes(name)
    values = decode(torch.arange(len(grid)).to(torch.uint8), fmt)
    assert [Fraction(value) for value in values.tolist()] == grid
    assert fmt.max_code == len(grid) - 1
    assert Fraction(fmt.max_value) == grid[-1]


@pytest.mark.parametrize("name", NAMES)
def test_encode_inverts_decode_for_every_code_that_is_produced(name):
    fmt, grid = ELEMENT_FORMATS[name], magnitudes(name)
    signs = (False, True) if fmt.signed else (False,)
    codes = torch.tensor([code(name, i, negative) for negative in signs for i in range(len(grid))])
    codes = codes.unique().to(torch.uint8)
    assert_same_bytes(encode(decode(codes, fmt), fmt), codes)


@pytest.mark.parametrize("name", NAMES)
def test_the_nearest_value_wins_and_ties_go_to_the_even_code(name):
    fmt, grid = ELEMENT_FORMATS[name], magnitudes(name)
    ties = [(low + high) / 2 for low, high in itertools.pairwise(grid)]
    values = around([*grid, *ties, 2 * grid[-1], Fraction(3e38)])
    if not fmt.signed:
        values = values.abs()
    expected = [
        code(name, nearest(name, abs(Fraction(v))), bool(np.signbit(np.float32(v)))) for v in values.tolist()
    ]
    assert encode(values, fmt).tolist() == expected


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ue5m3"])
def test_the_sign_is_kept_when_the_result_is_zero(name):
    fmt = ELEMENT_FORMATS[name]
    tiny = torch.tensor([-0.0, -1e-30, -1e-45])
    negative_zero = 0 if name in INTEGERS else fmt.sign_code
    assert encode(tiny, fmt).tolist() == [negative_zero] * 3


def test_nan_gets_the_nan_code_or_the_largest_magnitude():
    nan = torch.tensor([float("nan"), -float("nan")])
    expected = {"e2m1": 7, "e1m2": 7, "int4": 7, "int8": 127, "e4m3": 0x7F, "e5m2": 0x7F, "ue5m3": 0xFF}
    assert {name: encode(nan, fmt).tolist() for name, fmt in ELEMENT_FORMATS.items()} == {
        name: [value, value] for name, value in expected.items()
    }


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ue5m3"])
def test_infinity_saturates(name):
    fmt = ELEMENT_FORMATS[name]
    codes = encode(torch.tensor([torch.inf, -torch.inf]), fmt)
    assert decode(codes, fmt).tolist() == [fmt.max_value, -fmt.max_value]


@pytest.mark.parametrize(
    ("fmt", "peer", "bits"),
    [
        (E2M1, ml_dtypes.float4_e2m1fn, 4),
        (E4M3, ml_dtypes.float8_e4m3fn, 8),
        (E5M2, ml_dtypes.float8_e5m2, 8),
        (E8M0, ml_dtypes.float8_e8m0fnu, 8),
    ],
    ids=lambda p: getattr(p, "name", ""),
)
def test_all_codes_decode_as_in_ml_dtypes(fmt, peer, bits):
    codes = all_codes(bits)
    theirs = torch.from_numpy(codes.numpy().view(peer).astype(np.float32))
    ours = decode(codes, fmt)
    assert torch.equal(ours.isnan(), theirs.isnan())
    finite = ~ours.isnan()
    assert_same_bytes(ours[finite], theirs[finite])


@pytest.mark.parametrize(
    ("fmt", "peer", "bits"),
    [
        (E2M1, gfloat.formats.format_info_ocp_e2m1, 4),
        (E4M3, gfloat.formats.format_info_ocp_e4m3, 8),
        (E5M2, gfloat.formats.format_info_ocp_e5m2, 8),
    ],
    ids=lambda p: getattr(p, "name", ""),
)
def test_all_codes_decode_as_in_gfloat(fmt, peer, bits):
    ours = decode(all_codes(bits), fmt).tolist()
    theirs = [float(gfloat.decode_float(peer, c).fval) for c in range(1 << bits)]
    assert str(ours) == str(theirs)


def test_recorded_casts_of_e2m1_and_e4m3_are_equal():
    e2m1, e4m3 = recorded("others")["cast_e2m1"], recorded("others")["cast_e4m3"]
    number = ~e2m1["x"].isnan()
    assert_same_bytes(encode(e2m1["x"], E2M1)[number], e2m1["ml_dtypes_codes"][number])
    number = ~e4m3["x"].isnan()
    assert_same_bytes(encode(e4m3["x"], E4M3)[number], e4m3["torch_codes_after_clamp448"][number])


def test_codes_of_ue5m3_above_the_largest_are_nan():
    values = decode(all_codes(), UE5M3)
    assert values.isnan().tolist() == [c > 0xF7 for c in range(256)]


def test_codes_that_are_never_produced_decode_to_the_most_negative_integer():
    assert decode(torch.tensor([8], dtype=torch.uint8), ELEMENT_FORMATS["int4"]).item() == -8
    assert decode(torch.tensor([0x80], dtype=torch.uint8), ELEMENT_FORMATS["int8"]).item() == -128


def test_code_times_scale_is_exact_in_bfloat16_for_every_code_and_scale_byte():
    scales = decode(all_codes()[:0x7F], E4M3).double()
    for name in ("e2m1", "e1m2", "int4"):
        products = decode(all_codes(4), ELEMENT_FORMATS[name]).double()[:, None] * scales
        assert torch.equal(products.to(torch.bfloat16).double(), products), name
