"""Equal bytes with TransformerEngine's reference, for every finite input that was recorded."""

import pytest
import torch

from fourbits.formats.packing import swizzle_scales, unswizzle_scales
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from support.assertions import assert_same_bytes
from support.recorded import recorded, without_negative_zero

ROWS, OTHERS = recorded("rows_1x16"), recorded("others")
SQUARE = OperandSpec(block=(16, 16))


def assert_matches(q, codes, scales):
    """Where the reference crops codes or keeps scales of padding, its columns are compared."""
    assert_same_bytes(
        without_negative_zero(q.codes[:, : codes.shape[1]]), without_negative_zero(codes), "codes"
    )
    assert_same_bytes(q.block_scale.view(torch.uint8), scales, "scales")


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_16_equal_the_reference(case):
    recording = ROWS[case]
    q = quantize(recording["x"], OperandSpec(), axis=1, amax=recording["amax"])
    assert_matches(q, recording["codes"], recording["scales"])


@pytest.mark.parametrize("case", [case for case in OTHERS if case.startswith("w2d")])
def test_tiles_of_16_equal_the_reference_in_both_directions(case):
    recording = OTHERS[case]
    for axis, suffix in ((1, ""), (0, "_t")):
        q = quantize(recording["x"], SQUARE, axis=axis, amax=recording["amax"])
        scales = q.block_scale.view(torch.uint8).repeat_interleave(16, 0)
        assert_same_bytes(
            without_negative_zero(q.codes), without_negative_zero(recording[f"codes{suffix}"]), "codes"
        )
        assert_same_bytes(scales, recording[f"scales{suffix}"], "scales")


@pytest.mark.parametrize("case", [case for case in OTHERS if case.startswith("rht")])
def test_transformed_columns_equal_the_reference(case):
    recording = OTHERS[case]
    rows = quantize(recording["x"], OperandSpec(), axis=1)
    assert_matches(rows, recording["codes"], recording["scales"])
    columns = quantize(recording["x"], OperandSpec(rht=16), axis=0)
    assert_matches(columns, recording["codes_t"], recording["scales_t"])


@pytest.mark.parametrize("case", [case for case in OTHERS if case.startswith("tail")])
def test_incomplete_blocks_equal_the_reference(case):
    recording = OTHERS[case]
    assert_matches(quantize(recording["x"], OperandSpec(), axis=1), recording["codes"], recording["scales"])


def test_swizzled_scales_equal_torchao():
    scales, flat = OTHERS["swizzle"]["scales_200x9"], OTHERS["swizzle"]["ao_to_blocked"]
    assert_same_bytes(swizzle_scales(scales), flat)
    assert_same_bytes(unswizzle_scales(flat, 200, 9), scales)


FOUR_OVER_SIX_RULES: dict[str, str] = {"mse": "4over6-mse", "mae": "4over6-mae"}
FOUR_OVER_SIX = [
    (case, metric, bound)
    for case in ROWS
    for bound in (256, 448)
    for metric in FOUR_OVER_SIX_RULES
    if f"4over6_{bound}_{metric}/codes" in ROWS[case]
]


@pytest.mark.parametrize(("case", "metric", "bound"), FOUR_OVER_SIX)
def test_four_over_six_equals_the_reference(case, metric, bound):
    recording = ROWS[case]
    spec = OperandSpec(scale_rule=FOUR_OVER_SIX_RULES[metric], scale_bound=bound)
    name = f"4over6_{bound}_{metric}"
    q = quantize(recording["x"], spec, axis=1, amax=recording["amax"])
    assert_matches(q, recording[f"{name}/codes"], recording[f"{name}/scales"])
