"""The fused quantizers without a card: equal bytes in Triton's interpreter, and what they refuse."""

import pytest
import torch

from fourbits.quant.kernels.launch_exact import fused_operands
from fourbits.quant.kernels.support import Wanted, why_not_fused
from fourbits.quant.operand import OperandSpec
from support.triton_interpreter import run


def test_fused_bytes_are_the_references():
    result = run("fused_cases")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_tensor_without_a_card_is_refused_by_name():
    with pytest.raises(ValueError, match="NVIDIA cards, x is on cpu"):
        fused_operands(torch.zeros(16, 16), [Wanted(OperandSpec(), 1)])


@pytest.mark.parametrize(
    ("spec", "axis", "reason"),
    [
        (OperandSpec(format="nvfp4-double"), 1, "format nvfp4-double has no kernel"),
        (OperandSpec(block=(1, 8)), 1, "blocks must be"),
        (OperandSpec(scale_rule="search-mse"), 1, "scale_rule search-mse has no kernel"),
        (OperandSpec(rht=8), 0, "sizes 16, 32, 64, 128, got 8"),
        (OperandSpec(fp32_scale="pow2"), 1, "fp32_scale='pow2' has no kernel"),
    ],
)
def test_what_has_no_kernel_is_named(monkeypatch, spec, axis, reason):
    monkeypatch.setattr("fourbits.quant.kernels.support.device_blocker", lambda device: None)
    answer = why_not_fused(torch.zeros(16, 16), [Wanted(spec, axis)])
    assert answer is not None
    assert reason in answer


def test_one_read_makes_one_operand_of_each_axis(monkeypatch):
    monkeypatch.setattr("fourbits.quant.kernels.support.device_blocker", lambda device: None)
    answer = why_not_fused(torch.zeros(16, 16), [Wanted(OperandSpec(), 1)] * 2)
    assert answer is not None
    assert "one operand of each axis" in answer


def test_transformed_rows_are_made_alone(monkeypatch):
    monkeypatch.setattr("fourbits.quant.kernels.support.device_blocker", lambda device: None)
    both = [Wanted(OperandSpec(rht=16), 1), Wanted(OperandSpec(), 0)]
    answer = why_not_fused(torch.zeros(16, 16), both)
    assert answer is not None
    assert "turned copy" in answer
    assert why_not_fused(torch.zeros(16, 16), both[:1]) is None


def test_noise_without_a_key_is_refused(monkeypatch):
    monkeypatch.setattr("fourbits.quant.kernels.support.device_blocker", lambda device: None)
    with pytest.raises(ValueError, match="needs a key"):
        fused_operands(torch.zeros(16, 16), [Wanted(OperandSpec(rounding="sr"), 1)])


@pytest.mark.parametrize(
    ("shape", "strides", "rht", "fused"),
    [
        ((16, 64), (1 << 24, 1), 0, False),
        ((16, 64), (1 << 23, 1), 0, True),
        ((16, 1 << 24), (1 << 24, 1), 0, False),
        ((1 << 24, 16), (16, 1), 0, True),
        ((1 << 24, 16), (1, 1 << 24), 0, True),  # read from a copy
        ((1 << 24, 16), (16, 1), 16, False),  # read from a turned copy
    ],
)
def test_rows_too_far_apart_for_offsets_of_32_bits_are_left_to_the_reference(
    monkeypatch, shape, strides, rht, fused
):
    monkeypatch.setattr("fourbits.quant.kernels.support.device_blocker", lambda device: None)
    x = torch.empty_strided(shape, strides, device="meta", dtype=torch.bfloat16)
    answer = why_not_fused(x, [Wanted(OperandSpec(rht=rht), 1)])
    assert answer is None if fused else answer == "rows have more than 16777200 elements"
