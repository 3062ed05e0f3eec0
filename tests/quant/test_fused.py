"""The fused quantizers without a GPU: equal bytes in Triton's interpreter, and what they refuse."""

import pytest
import torch

from fourbits.quant.kernels import support
from fourbits.quant.kernels.support import unsupported, unsupported_packed_spec
from fourbits.quant.operand import OperandSpec
from fourbits.quant.request import OperandRequest, Signature
from support.triton_interpreter import run

CPU = torch.device("cpu")
EDEN = OperandSpec(rounding="ms-eden", rht=128, rht_signs="per-call")


def on(device=CPU, shape=(16, 16), strides=(16, 1)):
    return Signature(device, torch.bfloat16, shape, strides)


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(support, "unsupported_device", lambda device: None)


def test_fused_bytes_are_the_references():
    result = run("fused_cases")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("device", ["cpu", "xpu", "mps"])
def test_a_tensor_that_is_not_on_an_nvidia_gpu_is_refused_by_name(device):
    reason = unsupported(on(torch.device(device)), [OperandRequest(OperandSpec(), 1)])
    assert reason == f"the fused kernels are for NVIDIA GPUs, the tensor is on {device}"


@pytest.mark.parametrize(
    ("spec", "axis", "reason"),
    [
        (OperandSpec(format="nvfp4-double"), 1, "format nvfp4-double has no kernel"),
        (OperandSpec(block=(1, 8)), 1, "blocks must be"),
        (OperandSpec(scale_rule="4over6-mse", block=(1, 32)), 1, "4over6-mse has a kernel for blocks of 16"),
        (OperandSpec(scale_rule="search-mse", block=(1, 32)), 1, "search-mse has a kernel for blocks of 16"),
        (OperandSpec(rht=8), 0, "sizes 16, 32, 64, 128, got 8"),
        (OperandSpec(fp32_scale="pow2"), 1, "fp32_scale='pow2' has no kernel"),
    ],
)
def test_what_has_no_kernel_is_named(any_device, spec, axis, reason):
    assert reason in (unsupported(on(), [OperandRequest(spec, axis)]) or "")


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        ([OperandRequest(OperandSpec(), 1)] * 2, "at most one operand of each axis"),
        ([OperandRequest(OperandSpec(rht=16), 1), OperandRequest(OperandSpec(), 0)], "transposed copy"),
        (
            [OperandRequest(OperandSpec(), 1), OperandRequest(EDEN, 0)],
            "MS-EDEN transforms in a separate pass",
        ),
        ([OperandRequest(OperandSpec(), 1, True), OperandRequest(OperandSpec(), 0)], "a separate kernel"),
        (
            [OperandRequest(OperandSpec(), 1, amax="stored"), OperandRequest(OperandSpec(), 0, True)],
            "not packed",
        ),
        (
            [OperandRequest(OperandSpec(), 1, amax="stored"), OperandRequest(OperandSpec(format="mxfp4"), 0)],
            "one scale per tensor",
        ),
        (
            [OperandRequest(OperandSpec(), 1), OperandRequest(OperandSpec(format="fp8"), 0)],
            "different kernels",
        ),
    ],
)
def test_what_one_pass_does_not_make_is_said(any_device, requests, reason):
    assert reason in (unsupported(on(), requests) or "")
    assert all(unsupported(on(), [request]) is None for request in requests)


@pytest.mark.parametrize(
    ("shape", "strides", "rht", "fused"),
    [
        ((16, 64), (1 << 24, 1), 0, False),
        ((16, 64), (1 << 23, 1), 0, True),
        ((16, 1 << 24), (1 << 24, 1), 0, False),
        ((1 << 24, 16), (16, 1), 0, True),
        ((1 << 24, 16), (1, 1 << 24), 0, True),  # read from a copy
        ((1 << 24, 16), (16, 1), 16, False),  # read from a transposed copy
    ],
)
def test_rows_too_far_apart_for_offsets_of_32_bits_are_left_to_the_reference(
    any_device, shape, strides, rht, fused
):
    reason = unsupported(on(CPU, shape, strides), [OperandRequest(OperandSpec(rht=rht), 1)])
    assert reason is None if fused else reason == "rows have more than 16777200 elements"


@pytest.mark.parametrize("block", [(4, 4), (1, 4), (1, 8), (2, 24)], ids=str)
def test_packed_blocks_shorter_than_what_a_thread_reads_are_refused(block):
    """Kernels divide a row's entries among its blocks; of a block of 4 they would read scales anywhere."""
    reason = unsupported_packed_spec(OperandSpec(block=block))
    assert reason == f"packed blocks must be a multiple of 16 long, got {block}"
