"""The kernels of convolution and gated norm without a GPU: correct in the interpreter, and well compiled."""

import re

import pytest
import torch

from fourbits.model.ops.conv.kernels import conv_triton
from fourbits.model.ops.conv.op import conv_silu
from fourbits.model.ops.gated_norm.kernels import gated_norm_triton
from support.kernel_builds import on_gpu, recording, registers, stack_bytes
from support.triton_interpreter import run

#: width and groups of hybrid-1.2b and hybrid-12b
GROUPS = [(4096, 4), (10240, 8)]


def test_kernels_match_their_definitions_in_value_and_gradients():
    result = run("mixer_cases")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_convolution_without_four_taps_runs_in_pytorch_and_is_rounded_once():
    x, taps, bias = torch.randn(2, 9, 12).bfloat16(), torch.randn(3, 12), torch.randn(12)
    found, exact = (conv_silu(x, taps, bias, None, (8, 4), fused) for fused in (True, False))
    for got, true in zip(found, exact, strict=True):
        assert torch.equal(got, true.bfloat16())


@pytest.mark.parametrize("sm", [90, 100, 120])
@pytest.mark.parametrize("documents", [False, True])
def test_the_convolution_keeps_its_inputs_in_registers(sm, documents):
    x = on_gpu(2, 256, 9280)[..., 4096:8192]
    taps, bias = on_gpu(4, 5120, dtype=torch.float32)[:, :4096], on_gpu(4096, dtype=torch.float32)
    numbers = on_gpu(2, 256, dtype=torch.int32) if documents else None
    with recording(conv_triton) as starts:
        conv_triton.forward(x, taps, bias, numbers)
        conv_triton.backward(x, x, taps, bias, numbers)
    assert len(starts) == 2
    for start in starts:
        built = start.build(sm)
        assert built.metadata.shared == 0, "nothing passes between threads"
        assert stack_bytes(built) == 0
        assert registers(built) <= 168, "more would leave fewer than 12 warps to hide the memory's latency"


@pytest.mark.parametrize("sm", [90, 100, 120])
@pytest.mark.parametrize(("width", "groups"), GROUPS)
def test_the_gated_norm_reads_16_bytes_at_a_time_and_spills_nothing(sm, width, groups):
    y, z = on_gpu(2, 64, width), on_gpu(2, 64, 2 * width)[..., :width]
    weight = on_gpu(width, dtype=torch.float32)
    with recording(gated_norm_triton) as starts:
        gated_norm_triton.forward(y, z, weight, groups, 1e-5)
        gated_norm_triton.backward(y, y, z, weight, groups, 1e-5)
    assert len(starts) == 2
    for start in starts:
        built = start.build(sm)
        assert stack_bytes(built) == 0
        loads = re.findall(r"ld\.global\S*", built.asm["ptx"])
        assert loads
        assert all(".v4.b32" in load for load in loads)
