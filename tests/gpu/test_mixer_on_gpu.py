"""The kernels of convolution and gated norm on a GPU: correct at real shapes, and deterministic."""

import pytest
import torch

from fourbits.model.ops.conv.op import conv_backward, conv_forward
from fourbits.model.ops.gated_norm.op import gated_norm_backward
from support.mixer_cases import Conv, Norm, conv_errors, norm_errors

pytestmark = pytest.mark.gpu
GPU = "cuda"


@pytest.mark.parametrize(
    "case",
    [Conv(1, 1093, (10240, 1024, 1024)), Conv(2, 333, (4096, 512, 512), ends=0.01), Conv(3, 2, (24,))],
    ids=str,
)
def test_the_convolution_differs_from_fp64_by_its_roundings_only(case):
    assert not conv_errors(case, GPU, torch.bfloat16)


@pytest.mark.parametrize("case", [Norm(1, 333, 10240, 8), Norm(2, 77, 4096, 4), Norm(3, 5, 48, 2)], ids=str)
def test_the_gated_norm_differs_from_fp64_by_its_roundings_only(case):
    assert not norm_errors(case, GPU, torch.bfloat16)


def test_equal_arguments_give_equal_bits():
    x, dy = torch.randn(2, 2, 700, 5120, device=GPU).bfloat16()
    taps, bias = torch.randn(4, 5120, device=GPU), torch.randn(5120, device=GPU)
    runs = [
        [
            conv_forward(x, taps, bias, None),
            *conv_backward(dy, x, taps, bias, None),
            *gated_norm_backward(dy, x, dy, bias, 4, 1e-5),
        ]
        for _ in range(3)
    ]
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


def test_offsets_beyond_two_to_the_31_elements_are_correct():
    """The last tokens of a tensor of 2.3e9 elements have the same bits as computed alone."""
    x = torch.randn(1, 70000, 33024, device=GPU, dtype=torch.bfloat16)
    taps, bias = torch.randn(4, 33024, device=GPU), torch.randn(33024, device=GPU)
    y = conv_forward(x, taps, bias, None)
    assert torch.equal(y[:, -500:], conv_forward(x[:, -503:], taps, bias, None)[:, 3:])
