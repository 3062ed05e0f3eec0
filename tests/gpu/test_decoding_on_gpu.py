"""The kernels of a decoded token on a GPU: correct at real shapes, and deterministic."""

import pytest
import torch

from fourbits.model.ops.mamba_step.op import mamba_step
from support.decoding_cases import STEPS, Step, norm_errors, state_errors, step_errors, weights_of

pytestmark = pytest.mark.gpu
GPU, BF16, FP32 = "cuda", torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "case",
    [*STEPS, Step(64, 4, 16, 64, 128, begins=0.1), Step(1, 8, 20, 64, 128), Step(5, 8, 16, 80, 128)],
    ids=str,
)
def test_a_mixers_step_differs_from_fp64_by_its_roundings_only(case):
    assert not step_errors(case, GPU, BF16)


@pytest.mark.parametrize("residual", [BF16, FP32])
@pytest.mark.parametrize("shape", [(64, 1, 2048), (2, 300, 5120), (3, 40)])
def test_a_norm_differs_from_fp64_by_its_roundings_only(shape, residual):
    assert not norm_errors(shape, residual, BF16, GPU)


@pytest.mark.parametrize("length", [3, 300])
@pytest.mark.parametrize("starts", [False, True])
def test_the_state_after_a_scan_differs_from_fp64_by_its_roundings_only(length, starts):
    assert not state_errors(length, starts, GPU, BF16)


def test_equal_arguments_give_equal_bits():
    case = Step(64, 4, 16, 64, 128)
    torch.manual_seed(0)
    weights = weights_of(case, GPU)
    projected = torch.randn(64, sum(weights.widths), device=GPU).to(BF16)
    inputs = torch.randn(64, 3, weights.widths[1], device=GPU).to(BF16)
    state, begins = torch.randn(64, 64, 64, 128, device=GPU), torch.zeros(64, dtype=torch.bool, device=GPU)
    runs = []
    for _ in range(3):
        kept = inputs.clone(), state.clone()
        runs.append((mamba_step(projected, *kept, begins, weights, fused=True), *kept))
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))
