"""The oracle against TransformerEngine's recorded bytes: what it says, somebody else has said."""

import pytest
import torch
from torch import Tensor

from oracle.bridge import patterns
from oracle.operand import Operand
from oracle.quantize import quantize
from oracle.spec import Spec
from oracle.transform import rht, signs
from support.recorded import recorded, without_negative_zero

ROWS, OTHERS = recorded("rows_1x16"), recorded("others")


def oracle(x: Tensor, spec: Spec, axis: int = 1, amax: Tensor | None = None) -> Operand:
    largest = None if amax is None else patterns(amax.reshape(1, 1))[0][0]
    return quantize(patterns(x), (x.shape[0], x.shape[1]), spec, axis, largest)


def assert_recorded(o: Operand, codes: Tensor, scales: Tensor) -> None:
    """Scales are recorded one a row; -0.0 is recorded as code 0."""
    br, width = o.spec.blocks[0], codes.shape[1]
    ours = without_negative_zero(torch.tensor(o.packed(), dtype=torch.uint8))[:, :width]
    assert torch.equal(ours, without_negative_zero(codes))
    assert [o.block_scale[i // br] for i in range(o.rows)] == scales.tolist()


def some_rows(case: str, prefix: str, spec: Spec) -> None:
    """Every third row of a recording; rows are independent once amax is given."""
    x, amax = ROWS[case]["x"][::3], ROWS[case]["amax"]
    codes, scales = ROWS[case][f"{prefix}codes"][::3], ROWS[case][f"{prefix}scales"][::3]
    assert_recorded(oracle(x, spec, amax=amax), codes, scales)


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_16_equal_the_reference(case):
    some_rows(case, "", Spec())


@pytest.mark.parametrize("bound", [256, 448])
@pytest.mark.parametrize("metric", ["mse", "mae"])
@pytest.mark.parametrize("case", [case for case in ROWS if "4over6_256_mse/codes" in ROWS[case]])
def test_four_over_six_equals_the_reference(case, metric, bound):
    spec = Spec(scale_rule=f"4over6-{metric}", scale_bound=bound)
    some_rows(case, f"4over6_{bound}_{metric}/", spec)


@pytest.mark.parametrize("case", [case for case in OTHERS if case.startswith("w2d")])
def test_tiles_of_16_and_their_transpose_equal_the_reference(case):
    recording = OTHERS[case]
    o = oracle(recording["x"], Spec(block=(16, 16)), amax=recording["amax"])
    assert_recorded(o, recording["codes"], recording["scales"])
    assert_recorded(o.t(), recording["codes_t"], recording["scales_t"])


@pytest.mark.parametrize("case", [case for case in OTHERS if case.startswith("rht")])
def test_the_transform_and_what_is_quantized_after_it_equal_the_reference(case):
    recording = OTHERS[case]
    minus = signs("te16", 16, None)
    rotated = [rht(row, minus) for row in patterns(recording["x"].t())]
    assert rotated == patterns(recording["rht_of_xT"])
    o = oracle(recording["x"], Spec(rht=16), axis=0)
    assert_recorded(o, recording["codes_t"], recording["scales_t"])


@pytest.mark.parametrize("case", [case for case in OTHERS if case.startswith("tail")])
def test_incomplete_blocks_equal_the_reference(case):
    recording = OTHERS[case]
    assert_recorded(oracle(recording["x"], Spec()), recording["codes"], recording["scales"])
