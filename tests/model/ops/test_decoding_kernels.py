"""The kernels of a decoded token without a GPU: correct in the interpreter, and well compiled."""

import re

import pytest
import torch

from fourbits.model.ops.add_norm.kernels import add_norm_triton
from fourbits.model.ops.mamba_step.op import mamba_step
from fourbits.model.ops.mamba_step.weights import StepWeights
from support.decoding_cases import Step, weights_of
from support.every_kernel import decoding
from support.kernel_builds import on_gpu, recording, registers, stack_bytes
from support.triton_interpreter import run

#: groups, heads per group and head dim of hybrid-1.2b, hybrid-12b and nemotron-nano-12b-v2; states of 128
MIXERS = [(4, 16, 64), (8, 20, 64), (8, 16, 80)]


def test_kernels_match_their_definitions():
    result = run("decoding_cases")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_convolution_without_four_taps_runs_in_pytorch():
    torch.manual_seed(0)
    four = weights_of(Step(2, 1, 2, 8, 16), "cpu")
    three = StepWeights(
        four.conv_weight[..., 1:], *(getattr(four, name) for name in list(StepWeights.__slots__)[1:])
    )
    found = []
    for weights, fused in ((three, True), (four, False)):
        taps = weights.conv_weight.shape[-1]
        inputs, state = torch.ones(2, taps - 1, len(four.conv_bias)), torch.zeros(2, 2, 8, 16)
        if taps == 4:
            inputs[:, 0] = 0  # the input that three taps do not reach
        projected = torch.linspace(-1, 1, 2 * sum(four.widths)).view(2, -1)
        found.append(mamba_step(projected, inputs, state, torch.tensor([False, True]), weights, fused))
    assert torch.allclose(*found, rtol=1e-6)


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
@pytest.mark.parametrize(("groups", "per_group", "head_dim"), MIXERS)
def test_a_mixers_step_reads_states_16_bytes_at_a_time_and_spills_nothing(sm, groups, per_group, head_dim):
    starts = decoding(groups, per_group, head_dim)
    conv, step, norm = (start.build(sm) for start in starts)
    assert not any(map(stack_bytes, (conv, step, norm)))
    assert registers(step) <= 128, "two programs of 256 threads fit an SM"
    ptx = step.asm["ptx"]
    for access in (r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32"):
        assert len(re.findall(access, ptx)) >= head_dim * 128 // (256 * 4)


@pytest.mark.parametrize("sm", [80, 90, 120])
@pytest.mark.parametrize("width", [2048, 5120])
def test_a_norm_reads_the_stream_16_bytes_at_a_time_and_spills_nothing(sm, width):
    x, weight = on_gpu(64, width), on_gpu(width, dtype=torch.float32)
    with recording(add_norm_triton) as starts:
        add_norm_triton.add_norm(x, x, weight, 1e-5, torch.bfloat16)
        add_norm_triton.add_norm(x, None, weight, 1e-5, torch.bfloat16)
    for start in starts:
        built = start.build(sm)
        assert stack_bytes(built) == 0
        loads = re.findall(r"ld\.global\S*", built.asm["ptx"])
        assert loads
        assert all(".v4.b32" in load for load in loads)
