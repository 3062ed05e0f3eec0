"""Errors of single operands: what a technique is claimed to fix is fixed where the claim can be proved."""

from dataclasses import replace

import pytest
import torch

from fourbits.compare.techniques.findings import NO_TENSOR_SCALE
from fourbits.compare.techniques.gradients import bias_norm, transform_effect
from fourbits.compare.techniques.operands import (
    DRAWS,
    largest_elements,
    operand_errors,
    relative_error,
    rounding_bias,
    weight_mismatch,
)
from fourbits.compare.techniques.trained import LayerTensors


def layer(scale: float = 1.0) -> LayerTensors:
    """Normal tensors of 512 tokens, 48 inputs, 32 outputs; gradients of size `scale`."""
    torch.manual_seed(0)
    x, w, dy = torch.randn(512, 48), torch.randn(32, 48), torch.randn(512, 32) * scale
    return LayerTensors("a", x.bfloat16(), w, dy.bfloat16())


def with_outliers(x_factor: float, dy_factor: float) -> LayerTensors:
    """The same, with one token of every block multiplied by a factor in X and in dY."""
    plain = layer()
    x, dy = plain.x.clone(), plain.dy.clone()
    x[::16] *= x_factor
    dy[::16] *= dy_factor
    return replace(plain, x=x, dy=dy)


def largest(found: LayerTensors, recipe: str) -> dict[tuple[str, str], float]:
    return {(each.operand, each.format): each.error for each in largest_elements(recipe, found)}


def test_the_largest_element_of_an_nvfp4_block_errs_by_at_most_half_a_step_of_its_scale():
    found = largest(layer(), "nvfp4")
    # An E4M3 scale rounds by at most 1/16 in relative terms, and the element then is at most its 6.
    assert 0 < found["X", "nvfp4"] < 1 / 16
    assert 0 < found["dY", "nvfp4"] < 1 / 16


def test_small_gradients_are_lost_without_the_tensor_scale_and_kept_with_it():
    found = largest(layer(scale=1e-6), "nvfp4")
    assert found["dY", NO_TENSOR_SCALE] == 1.0
    assert found["dY", "nvfp4"] < 1 / 16


def test_tensors_of_ordinary_size_need_no_tensor_scale():
    found = largest(layer(), "nvfp4")
    assert found["X", NO_TENSOR_SCALE] < 1 / 16


def test_power_of_two_scales_leave_more_error_than_e4m3_scales():
    assert largest(layer(), "mxfp4")["X", "mxfp4"] > 2 * largest(layer(), "nvfp4")["X", "nvfp4"]


def test_square_blocks_give_one_w_in_both_directions_and_rows_do_not():
    row, square = weight_mismatch(layer())
    assert (row.block, square.block) == ("1x16", "16x16")
    assert square.mismatch == 0.0
    assert row.mismatch > row.error  # two independent errors are larger than one
    assert square.error > row.error  # the price


def test_errors_of_operands_order_the_formats():
    errors = {
        name: {each.operand: each.error for each in operand_errors(name, 0, layer())}
        for name in ("fp8", "nvfp4", "mxfp4")
    }
    for operand in ("X", "W", "dY"):
        assert errors["fp8"][operand] < errors["nvfp4"][operand] < errors["mxfp4"][operand]


def test_stochastic_draws_average_out_and_one_of_them_is_worse_than_rounding_to_nearest():
    found = rounding_bias("nvfp4", 0, layer())
    assert found.draws == DRAWS == 64
    assert found.nearest < found.one_draw
    # Unbiased draws leave an eighth of one; clipped block maxima leave the rest.
    assert found.one_draw / 8 * 0.9 < found.mean_of_draws < found.nearest / 2


def test_the_transform_helps_where_a_token_is_an_outlier_in_x_and_dy_and_harms_where_they_oppose():
    assert transform_effect("nvfp4", 0, layer()).size == 16
    assert transform_effect("nvfp4", 0, layer()).ratio == pytest.approx(1, abs=0.05)  # nothing to spread
    assert transform_effect("nvfp4", 0, with_outliers(10.0, 10.0)).ratio < 0.9
    # Without the transform the error of the large gradients meets inputs near zero, with it all inputs.
    assert transform_effect("nvfp4", 0, with_outliers(0.0, 100.0)).ratio > 1.2


def test_a_relative_error_of_zero_tensors_is_zero():
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0.0


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_the_bias_is_estimated_without_the_noise_of_few_draws(bias: float):
    torch.manual_seed(1)
    target = torch.zeros(100_000, dtype=torch.float64)
    draws = torch.randn(4, 100_000, dtype=torch.float64)
    draws[:, 0] += bias * 1000
    # The squared estimate has a standard deviation of about sqrt(2 * elements) / draws = 112.
    expected = bias * 1000
    assert bias_norm(draws, target).square().item() == pytest.approx(expected**2, abs=4 * (112 + expected))
    naive = draws.mean(0).norm().square().item()
    assert naive - expected**2 > 20_000  # what noise alone adds to the mean of four draws: 100,000 / 4


def test_one_draw_counts_as_without_randomness():
    assert bias_norm(torch.tensor([[3.0, 4.0]]), torch.zeros(2)).item() == 5.0
