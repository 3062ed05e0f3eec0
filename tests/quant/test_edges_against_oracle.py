"""The contract for the edges (docs/nvfp4.md, section 13): fourbits' bytes are the oracle's there too."""

import itertools

import pytest
import torch

from oracle.spec import FORMATS, Spec
from support.adversarial import FINITE, NON_FINITE
from support.agreement import assert_agree, by_fourbits

KEY = (1, 2, 3, 4, 5)
QUANTIZED = [name for name, kind in FORMATS.items() if kind.element]
ONE_SCALE = [
    *[("nvfp4", None), ("nve1m2", None), ("nvint4", (16, 16))],
    *[(name, (0, 0)) for name in ("fp8", "fp8-e5m2", "int8")],
]
FMAX, INF, NAN = 3.4028234663852886e38, float("inf"), float("nan")


def square(name: str) -> tuple[int, int] | None:
    """Square blocks of a format that has them."""
    kind = FORMATS[name]
    return None if kind.fp32 == "outer" else (16, 16) if kind.two_level else (32, 32)


@pytest.mark.parametrize("rounding", ["rne", "sr"])
@pytest.mark.parametrize("kind", NON_FINITE)
@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks_with_non_finite_elements_equal_the_oracle(name, kind, rounding):
    for block, shape, axis in itertools.product([None, square(name)], [(3, 40), (18, 17)], [0, 1]):
        x = NON_FINITE[kind](shape, axis)
        assert_agree(x, Spec(format=name, block=block, rounding=rounding), axis=axis, sr_key=KEY)


@pytest.mark.parametrize("rht", [16, 128])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-double", "nvfp4-ue5m3", "mxfp8", "fp8"])
def test_non_finite_elements_poison_their_rotated_group_as_in_the_oracle(name, rht):
    for number, kind in enumerate(NON_FINITE):
        assert_agree(NON_FINITE[kind]((3, 40), number), Spec(format=name, rht=rht), axis=number % 2)


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_unquantized_operands_keep_what_is_not_finite(name):
    for kind, rht in itertools.product(NON_FINITE, [0, 16]):
        assert_agree(NON_FINITE[kind]((3, 40), 1), Spec(format=name, rht=rht))


@pytest.mark.parametrize("amax", [0.0, -0.0, 1e-45, 7.9e-36, 1e-3, -2.0, 1e4, FMAX, INF, -INF, NAN])
@pytest.mark.parametrize(("name", "block"), ONE_SCALE)
def test_given_amax_of_any_size_equals_the_oracle(name, block, amax):
    spec = Spec(format=name, block=block, rounding="sr")
    for kind in ("normal", "huge", "zeros", "subnormal"):
        assert_agree(FINITE[kind]((3, 33), 2), spec, amax=amax, sr_key=KEY)
    for kind in NON_FINITE:
        assert_agree(NON_FINITE[kind]((18, 17), 2), spec, axis=0, amax=amax, sr_key=KEY)


@pytest.mark.parametrize("rht", [0, 64])
@pytest.mark.parametrize("shape", [(0, 16), (5, 0), (0, 0), (0, 17)])
@pytest.mark.parametrize("name", [*QUANTIZED, "bf16", "fp32"])
def test_empty_operands_equal_the_oracle(name, shape, rht):
    blocks = {None, square(name)} if name in QUANTIZED else {None}
    blocks |= {(0, 0)} if FORMATS[name].fp32 == "block" else set()
    for block, axis in itertools.product(blocks, (0, 1)):
        assert_agree(torch.zeros(shape), Spec(format=name, block=block, rht=rht), axis=axis)


@pytest.mark.parametrize("size", [1, 15, 17, 48])
@pytest.mark.parametrize("name", QUANTIZED)
def test_odd_sizes_equal_the_oracle(name, size):
    for other, axis in itertools.product((1, 3), (0, 1)):
        assert_agree(FINITE["normal"]((size, other), size), Spec(format=name, block=square(name)), axis=axis)


@pytest.mark.parametrize("limit", [7.8e-36, 7.9e-36, 8e-36, 1.2e-38, 1e-45, 3.4e38, FMAX])
def test_own_amax_at_the_limits_of_fp32_equals_the_oracle(limit):
    x = FINITE["normal"]((3, 40), 3).clamp(-1, 1)
    x[0, 0] = 1.0
    for name in ("nvfp4", "nvint4", "nvfp4-ue5m3", "nvfp4-ue5m3-global", "nvfp4-double", "fp8", "mxfp4"):
        for pow2 in ("exact", "pow2") if FORMATS[name].fp32 else ("exact",):
            assert_agree(x * limit, Spec(format=name, fp32_scale=pow2))


def test_negative_zero_keeps_its_sign_in_every_format_that_has_one():
    x = torch.full((2, 32), -0.0)
    x[1, 5] = 1.0
    codes = {"nvfp4": 8, "nve1m2": 8, "nvint4": 0, "int8": 0, "mxfp4": 8, "mxfp8": 0x80, "fp8-e5m2": 0x80}
    for name, negative_zero in codes.items():
        assert set(assert_agree(x, Spec(format=name)).codes[0]) == {negative_zero}


@pytest.mark.parametrize("name", ["nvfp4-double", "nvfp4-ue5m3", "mxfp4", "mxfp8", "bf16"])
def test_an_amax_without_effect_is_refused(name):
    with pytest.raises(ValueError, match="amax"):
        by_fourbits(torch.ones(2, 32), Spec(format=name), amax=1.0)


@pytest.mark.parametrize(
    "field", ["rounding:sr", "rounding:sr32", "rht_signs:per-layer", "rht_signs:per-call"]
)
def test_randomness_without_a_key_is_refused(field):
    name, _, value = field.partition(":")
    with pytest.raises(ValueError, match="sr_key"):
        by_fourbits(torch.ones(2, 32), Spec(rht=32, **{name: value}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="float"):
        by_fourbits(torch.ones(2, 32).to(dtype), Spec())
