"""Error feedback on a GPU: the reference's bytes, and a compiled layer in a CUDA graph."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.recipe.presets import get_recipe
from support.feedback_cases import BF16, FOUR_OVER_SIX, LONG, ROW, SMALL, FeedbackCase, differences
from support.fused_cases import Case

pytestmark = pytest.mark.gpu

ALL = replace(ROW, error_feedback=2048)
LARGE = [FeedbackCase(Case("row", (304, 1072)), spec) for spec in (ROW, FOUR_OVER_SIX, BF16, LONG, ALL)]


@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=lambda case: case.name)
def test_kernels_give_the_references_bytes(case):
    assert differences(case, "cuda") == []


@pytest.mark.parametrize("span", [128, 256])
def test_a_captured_step_reads_coefficients_that_change(span):
    base = get_recipe("quartet2-46")
    recipe = replace(
        base,
        fprop=replace(base.fprop, lhs=replace(base.fprop.lhs, error_feedback=span)),
        wgrad=replace(base.wgrad, rhs=replace(base.wgrad.rhs, source="as_is")),
    )
    torch.manual_seed(0)
    layer = nn.Linear(256, 256, device="cuda")
    x = torch.randn(64, 256, device="cuda")
    convert(layer, recipe)
    set_step(layer, 0)
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        layer.weight.mul_(torch.linspace(0.5, 2, 256, device="cuda"))
        set_step(layer, 1)
        graph.replay()
        assert torch.equal(y, layer(x))
