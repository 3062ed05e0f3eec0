"""A layer is claimed by the branches that its module takes; timm's BEiT and fla's GatedMLP have others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fourbits as fb

RECIPE = "nvfp4-naive"


class Beit(nn.Module):
    """Multiplies by the weight itself if there is a bias for q and v, and it is not added later."""

    def __init__(self, bias: bool, separate: bool = False) -> None:
        super().__init__()
        self.separate, self.qkv, self.proj = separate, nn.Linear(32, 96, bias=False), nn.Linear(96, 32)
        self.q_bias = nn.Parameter(torch.zeros(96)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.q_bias is None:
            qkv = self.qkv(x)
        elif self.separate:
            qkv = self.qkv(x) + self.q_bias
        else:
            qkv = F.linear(x, weight=self.qkv.weight, bias=self.q_bias)
        return self.proj(qkv)


class Gated(nn.Module):
    """Returns from the branch that multiplies, so that the call below it never runs."""

    def __init__(self, fused: bool = True, kind: str = "swish") -> None:
        super().__init__()
        self.fused, self.config = fused, SimpleNamespace(kind=kind)
        self.qkv, self.proj = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        if not (not self.fused or self.config.kind == "powlu"):
            return F.linear(x, self.qkv.weight, self.qkv.bias)
        return self.qkv(x)


class Switched(Gated):
    """Decides again in every call."""

    def forward(self, x: Tensor) -> Tensor:
        self.fused = x.shape[0] > 16
        if self.fused:
            return self.proj(F.linear(x, self.qkv.weight, self.qkv.bias))
        return self.proj(self.qkv(x))


@pytest.mark.parametrize(
    ("model", "claimed"),
    [
        (Beit(False), True),
        (Beit(True), False),
        (Beit(True, separate=True), True),
        (Gated(), False),
        (Gated(fused=False), True),
        (Gated(kind="powlu"), True),
        (Switched(), True),  # nothing decides before it runs
    ],
)
def test_a_layer_is_claimed_if_the_branches_that_its_module_takes_call_it(model, claimed):
    each: Any = model
    rows = {row.name: row for row in fb.convert(each, RECIPE).rows}
    assert rows["qkv"].quantized == claimed
    if not claimed:
        assert rows["qkv"].reason == f"{type(each).__name__} reads this weight and never calls the layer"
    fb.set_step(each, 0)
    each(torch.randn(16, 32)).square().mean().backward()
    report = fb.audit(each)
    assert ("qkv" in report.called, report.bypassed) == (claimed, ())
