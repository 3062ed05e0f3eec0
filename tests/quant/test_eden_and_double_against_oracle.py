"""MS-EDEN and double blocks: fourbits' bytes are the oracle's, and the promises of the rules hold."""

import pytest
import torch

from oracle.spec import Spec
from support.adversarial import FINITE, NON_FINITE
from support.agreement import assert_agree, by_oracle

KEY = (1234, 5 * 8 + 4, 17, 48, 3)


def eden(rht: int = 32, **fields) -> Spec:
    return Spec(rounding="ms-eden", rht=rht, **fields)


@pytest.mark.parametrize("rule", ["", "per-call", "none"])
@pytest.mark.parametrize("rht", [16, 32, 64, 128])
def test_ms_eden_equals_the_oracle(rht, rule):
    kinds = ["normal", "spread", "ties", "rows_apart", "zeros"]
    for number, kind in enumerate(kinds if rule else [*kinds, "huge", "tiny", "subnormal"]):
        shape = (2, 33) if number % 2 else (33, 2)
        assert_agree(FINITE[kind](shape, number), eden(rht, rht_signs=rule), axis=number % 2, sr_key=KEY)


@pytest.mark.parametrize("amax", [0.0, 1e-40, 1e-4, 1.0, 1e5, 3e38, float("nan")])
def test_ms_eden_with_a_given_amax_equals_the_oracle(amax):
    for kind in ("normal", "zeros", "spread"):
        assert_agree(FINITE[kind]((2, 32), 3), eden(), amax=amax, sr_key=KEY)
    for kind in NON_FINITE:
        assert_agree(NON_FINITE[kind]((3, 64), 3), eden(), amax=amax, sr_key=KEY)


@pytest.mark.parametrize("fields", [{"te_compat": False}, {"source": "bf16"}, {"fp32_scale": "pow2"}])
def test_ms_eden_with_other_options_equals_the_oracle(fields):
    for number, kind in enumerate(["normal", "rows_apart", "spread"]):
        assert_agree(FINITE[kind]((4, 32), number), eden(**fields), sr_key=KEY)


@pytest.mark.parametrize("shape", [(0, 16), (5, 0), (0, 0), (0, 17)])
def test_empty_operands_under_ms_eden_equal_the_oracle(shape):
    for axis in (0, 1):
        assert_agree(torch.zeros(shape), eden(), axis=axis, sr_key=KEY)


def test_a_block_whose_scale_underflows_under_ms_eden_is_zero_with_signs():
    x = torch.full((1, 64), 1e-9)
    x[0, 1::2] = -1e-9
    x[0, 0] = 1e3
    o = assert_agree(x, eden(rht=16, rht_signs="none"), sr_key=KEY)
    assert o.block_scale[0][1:] == [0, 0, 0]
    assert set(o.codes[0][16:]) <= {0, 8}


@pytest.mark.parametrize(
    "extra", [{}, {"block": (1, 32)}, {"outer": (1, 32)}, {"outer": (4, 64)}, {"rht": 16}]
)
@pytest.mark.parametrize("rounding", ["rne", "sr"])
def test_double_blocks_equal_the_oracle(extra, rounding):
    spec = Spec(format="nvfp4-double", rounding=rounding, **extra)
    for number, (kind, make) in enumerate(FINITE.items()):
        length = 40 if kind == "patterns" else 150
        shape = (2, length) if number % 2 else (length, 2)
        assert_agree(make(shape, number), spec, axis=number % 2, sr_key=KEY)


@pytest.mark.parametrize(
    "fields", [{"scale_rule": "4over6-mse"}, {"scale_rounding": "sr"}, {"fp32_scale": "pow2"}]
)
def test_double_blocks_with_scale_options_equal_the_oracle(fields):
    for number, kind in enumerate(["normal", "rows_apart", "tiny"]):
        assert_agree(FINITE[kind]((2, 140), number), Spec(format="nvfp4-double", **fields), sr_key=KEY)


def test_square_double_blocks_transpose_as_in_the_oracle():
    spec = Spec(format="nvfp4-double", block=(16, 16), outer=(32, 32))
    for number, shape in enumerate([(20, 40), (65, 17)]):
        o = assert_agree(FINITE["rows_apart"](shape, number), spec, axis=number)
        again = by_oracle(FINITE["rows_apart"](shape, number).t(), spec, number)
        assert (o.t().codes, o.t().block_scale, o.t().global_scale) == (
            again.codes,
            again.block_scale,
            again.global_scale,
        )


def test_an_outlier_in_one_outer_block_leaves_the_others_alone():
    x = FINITE["normal"]((2, 256), 1)
    loud = x.clone()
    loud[0, 3] = 1e6
    quiet, disturbed = (assert_agree(v, Spec(format="nvfp4-double")) for v in (x, loud))
    assert disturbed.block_scale[1] == quiet.block_scale[1]
    assert disturbed.codes[0][128:] == quiet.codes[0][128:]
    assert disturbed.codes[0][16:128] != quiet.codes[0][16:128]
