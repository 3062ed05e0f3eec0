"""How block scales are chosen and rounded: 4over6, search, ceil, bounds, stochastic, headroom, pow2."""

from itertools import chain

import pytest

from oracle.spec import Spec
from support.adversarial import FINITE
from support.agreement import assert_agree

KEY = (1234, 5 * 8 + 4, 17, 48, 3)
METRICS = ["mse", "mae", "max"]
KINDS = ["normal", "ties", "scale_ties", "rows_apart", "zeros", "tiny", "huge", "spread"]


def agree_on_all(spec: Spec, shape=(3, 40), kinds=KINDS):
    for number, kind in enumerate(kinds):
        sides = shape if number % 2 else shape[::-1]
        assert_agree(FINITE[kind](sides, number), spec, axis=number % 2, sr_key=KEY)


@pytest.mark.parametrize("bound", [256, 448])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("block", [(1, 16), (16, 16), (3, 5)])
def test_four_over_six_equals_the_oracle(block, metric, bound):
    agree_on_all(Spec(block=block, scale_rule=f"4over6-{metric}", scale_bound=bound), shape=(5, 33))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", ["nvfp4", "nve1m2", "nvint4"])
def test_scale_search_equals_the_oracle(name, metric):
    kinds = ["normal", "scale_ties", "rows_apart", "tiny"]
    rule = f"search-{metric}"
    agree_on_all(Spec(format=name, scale_rule=rule), shape=(2, 17), kinds=kinds)
    agree_on_all(Spec(format=name, scale_rule=rule, scale_bound=448), shape=(1, 16), kinds=kinds)
    agree_on_all(Spec(format=name, scale_rule=rule, block=(3, 5)), shape=(4, 16), kinds=kinds[:2])


@pytest.mark.parametrize("rounding", ["sr", "sr32"])
@pytest.mark.parametrize("extra", [{}, {"rht": 32}, {"te_compat": False}, {"source": "bf16"}])
def test_four_over_six_combines_with_everything(extra, rounding):
    for rule in ("4over6-mse", "4over6-mae"):
        agree_on_all(Spec(scale_rule=rule, rounding=rounding, **extra), shape=(2, 32))


@pytest.mark.parametrize("rule", ["max", "4over6-mse", "search-mae"])
@pytest.mark.parametrize("headroom", [False, True])
@pytest.mark.parametrize("pow2", ["exact", "pow2"])
def test_headroom_and_powers_of_two_equal_the_oracle(rule, headroom, pow2):
    spec = Spec(scale_rule=rule, rounding="sr32", sr_headroom=headroom, fp32_scale=pow2)
    agree_on_all(spec, shape=(2, 20), kinds=KINDS if rule != "search-mae" else KINDS[::3])


@pytest.mark.parametrize("name", ["nve1m2", "nvint4", "nvfp4-ue5m3", "nvfp4-ue5m3-global"])
def test_headroom_of_other_two_level_formats_equals_the_oracle(name):
    agree_on_all(Spec(format=name, rounding="sr", sr_headroom=True))


@pytest.mark.parametrize("block", [(1, 16), (16, 16), (2, 4), (3, 8), (2, 40), (1, 6)])
@pytest.mark.parametrize("name", ["nvfp4", "nvint4", "nvfp4-ue5m3"])
def test_stochastic_block_scales_equal_the_oracle(name, block):
    agree_on_all(Spec(format=name, block=block, scale_rounding="sr"))


@pytest.mark.parametrize("rounding", ["rne", "sr"])
def test_stochastic_scales_of_four_over_six_equal_the_oracle(rounding):
    for bound in (256, 448):
        spec = Spec(scale_rule="4over6-mse", scale_rounding="sr", scale_bound=bound, rounding=rounding)
        agree_on_all(spec, shape=(2, 32))


@pytest.mark.parametrize("name", ["nvfp4", "nve1m2", "nvint4"])
@pytest.mark.parametrize("bound", [256, 448])
def test_bounds_of_plain_scaling_equal_the_oracle(name, bound):
    agree_on_all(Spec(format=name, scale_bound=bound))


@pytest.mark.parametrize("block", [(1, 32), (32, 32), (2, 3)])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp8-e5m2"])
def test_ceil_equals_the_oracle(name, block):
    agree_on_all(Spec(format=name, block=block, scale_rule="ceil"))


@pytest.mark.parametrize("name", ["fp8", "fp8-e5m2", "int8"])
@pytest.mark.parametrize("block", [(1, 128), (3, 5), (0, 0)])
def test_powers_of_two_of_fp32_scaled_formats_equal_the_oracle(name, block):
    agree_on_all(Spec(format=name, block=block, fp32_scale="pow2"))


def test_four_over_six_picks_each_of_its_candidates_on_ordinary_data():
    x = FINITE["normal"]((8, 64), 3)
    o, plain = assert_agree(x, Spec(scale_rule="4over6-mse")), assert_agree(x, Spec(scale_bound=256))
    larger = [s > t for s, t in zip(chain(*o.block_scale), chain(*plain.block_scale), strict=True)]
    assert 0 < sum(larger) < len(larger)


def test_stale_amax_and_scale_rules_equal_the_oracle():
    x = FINITE["normal"]((2, 32), 7)
    for rule in ("4over6-mse", "4over6-max", "search-mae"):
        for amax in (0.0, 1e-3, 1e-40, 1e4, 3e38):
            assert_agree(x, Spec(scale_rule=rule), amax=amax)
