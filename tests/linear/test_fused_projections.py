"""Of projections that diffusers fuses, only those that the module's processor calls are claimed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourbits as fb

PARTS = {"to_q", "to_k", "to_v"}


class Separate:
    def __call__(self, attn: Any, x: Tensor) -> Tensor:
        return attn.to_out(attn.to_q(x) + attn.to_k(x) + attn.to_v(x))


class Fused:
    def __call__(self, attn: Any, x: Tensor) -> Tensor:
        return attn.to_out(sum(attn.to_qkv(x).chunk(3, -1)))


def projected(attn: Any, x: Tensor) -> Tensor:
    if attn.fused_projections:
        return sum(attn.to_qkv(x).chunk(3, -1))  # pyright: ignore[reportReturnType]
    return attn.to_q(x) + attn.to_k(x) + attn.to_v(x)


class Asking:
    def __call__(self, attn: Any, x: Tensor) -> Tensor:
        return attn.to_out(projected(attn, x))


class Attention(nn.Module):
    """Keeps its three projections beside the fused one."""

    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.fused_projections, self.processor = False, processor

    @torch.no_grad()
    def fuse_projections(self) -> None:
        self.to_qkv = nn.Linear(32, 96, bias=False)
        self.to_qkv.weight.copy_(torch.cat([self.to_q.weight, self.to_k.weight, self.to_v.weight]))
        self.fused_projections = True

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(self, x)


@pytest.mark.parametrize(
    ("processor", "fuse", "kept"),
    [
        (Separate, False, {}),
        (Separate, True, {"to_qkv": "to_q, to_k, to_v"}),  # the old processor again, after unfusing
        (Fused, True, dict.fromkeys(PARTS, "to_qkv")),
        (Asking, False, {}),
        (Asking, True, dict.fromkeys(PARTS, "to_qkv")),
    ],
)
def test_what_is_claimed_is_what_the_processor_calls(processor, fuse, kept):
    model = Attention(processor())
    if fuse:
        model.fuse_projections()
    summary = fb.convert(model, "nvfp4-naive")
    reasons = {name: f"Attention calls {other} instead" for name, other in kept.items()}
    assert {row.name: row.reason for row in summary.rows if not row.quantized} == reasons
    fb.set_step(model, 0)
    model(torch.randn(16, 32)).square().mean().backward()
    assert set(fb.audit(model).called) == {row.name for row in summary.rows if row.quantized}
