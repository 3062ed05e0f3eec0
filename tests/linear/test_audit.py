"""The audit distinguishes layers that run from layers that other code bypasses, and warns by itself, once."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.utils import parametrizations, prune

from fourbits.linear.audit import audit
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step

RECIPE = "nvfp4-naive"


class Past(nn.Module):
    """Multiplies by a layer's weight, behind a name that no reader of the source finds."""

    def __init__(self):
        super().__init__()
        self.used, self.past, self.spare = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        return F.linear(self.used(x), self._modules["past"].weight)  # pyright: ignore


def step(model: nn.Module, optimizer: Any = None) -> None:
    set_step(model, 0)
    model(torch.randn(16, 32)).square().mean().backward()
    if optimizer is not None:
        optimizer.step()


def test_a_layer_whose_weight_gets_a_gradient_without_a_call_is_bypassed():
    model = nn.Sequential(Past())
    convert(model, RECIPE)
    step(model)
    report = audit(model)
    assert (report.called, report.bypassed, report.unused) == (("0.used",), ("0.past",), ("0.spare",))
    assert report.claimed_share == 1
    assert report.called_share == pytest.approx(1 / 3)
    assert "bypassed: 0.past" in str(report)


def test_the_first_optimizer_step_warns_of_bypassed_layers_once_and_of_unused_ones_not_at_all():
    model = nn.Sequential(Past())
    convert(model, RECIPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(
        UserWarning, match=r"1 layer that convert quantized is never called.*0\.past.*100% .* 33% ran"
    ):
        step(model, optimizer)
    step(model, optimizer)  # a second warning would be an error
    model = nn.Sequential(nn.Linear(32, 32))
    convert(model, RECIPE)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_first_step_of_a_model_whose_every_layer_is_bypassed_warns():
    model = nn.Sequential(Past())
    convert(model, RECIPE, include="0.past")
    with pytest.warns(UserWarning, match=r"0\.past.* 0% ran"):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_step_of_another_models_optimizer_does_not_end_the_watch():
    model, other = nn.Sequential(Past()), nn.Linear(32, 32)
    convert(model, RECIPE)
    other(torch.randn(4, 32)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    with pytest.warns(UserWarning, match="never called"):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_step_that_a_checkpoint_invents_is_not_audited():
    """torch.distributed.checkpoint creates optimizer state by a step with gradients of zero."""
    model = nn.Sequential(nn.Linear(32, 32), Past())
    convert(model, RECIPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state
    with pytest.warns(UserWarning, match=r"1 layer that convert quantized is never called; .*1\.past"):
        step(model, optimizer)


def test_a_layer_that_its_class_bypasses_is_kept_before_anything_runs():
    """As WavLM does, which gives its projections to F.multi_head_attention_forward."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.out_proj, self.wo = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            x = x.to(self.out_proj.weight.dtype)
            return F.linear(self.out_proj(x), self.q_proj.weight, self.q_proj.bias) + self.wo(x)

    summary = convert(Attention(), RECIPE)
    kept = {row.name: row.reason for row in summary.rows if not row.quantized}
    assert kept == {"q_proj": "Attention reads this weight and never calls the layer"}


@pytest.mark.filterwarnings("ignore:.*set_step was never called")
def test_a_compiled_model_is_audited_without_graph_breaks_or_recompilation():
    model = nn.Sequential(Past(), nn.Linear(32, 32))
    convert(model, RECIPE)
    set_step(model, 0)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch._dynamo.utils.counters.clear()
    for number in range(3):
        set_step(model, number)
        compiled(torch.ones(16, 32)).square().mean().backward()
        if number:
            optimizer.step()
        else:
            with pytest.warns(UserWarning, match=r"never called; .*0\.past"):
                optimizer.step()
        optimizer.zero_grad()
    assert audit(model).called == ("0.used", "1")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_shares_of_the_audit_count_weights_as_the_summary_does():
    by_hook: Any = nn.utils.spectral_norm(nn.Linear(32, 32))
    prune.l1_unstructured(pruned := nn.Linear(32, 32), "weight", amount=0.5)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(32, 32)), by_hook, pruned)
    summary = convert(model, RECIPE)
    assert [row.name for row in summary.rows] == ["0", "1", "2"]
    assert summary.share_of_flops == 1
    step(model)
    report = audit(model)
    assert (report.claimed_share, report.called_share) == (1, 1)
