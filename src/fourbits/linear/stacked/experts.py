"""Modules of transformers' experts interface: Mixtral, Qwen3-MoE, DeepSeek-V3, GPT-OSS, NemotronH and others.

The interface defines what such a module computes, whatever implementation of transformers its config names:
a projection up, with a gate or an activation, and one down, per expert, weighted and summed over a token's
experts. Rows are sorted by expert on the device, and with grouped kernels no count is copied to the host.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fourbits.linear.flat import autocast_dtype
from fourbits.linear.stacked.layer import StackedLayers, local_experts
from fourbits.linear.stacked.product import multiply


class QuantizedExperts(nn.Module):
    """Experts that `convert` has given tables. Created by `convert` only, as a base of their own class."""

    quantization: StackedLayers
    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    act_fn: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
        """hidden_states: [T, K]; routing: each token's experts and their weights, [T, top_k] -> [T, K]."""
        state = self.quantization
        if state.runs_original(self.training):
            return state.original.forward(self, hidden_states, *routing, **named)
        chosen, weights = _routing(routing, named)
        top_k = chosen.shape[-1]
        order = chosen.reshape(-1).sort(stable=True)
        offsets = expert_offsets(order.values, self.num_experts)
        rows = hidden_states[order.indices // top_k]
        # rows of absent experts, which another rank holds, are sorted to the end
        absent = None
        if getattr(self, "_is_expert_parallel", False):
            absent = (order.values >= self.num_experts)[:, None]
            rows = rows.masked_fill(absent, 0.0)
        up = _projected(self, "gate_up_proj" if self.has_gate else "up_proj", rows, offsets)
        up = up if absent is None else up.masked_fill(absent, 0.0)
        inner = self._apply_gate(up) if self.has_gate else self.act_fn(up)
        out = _projected(self, "down_proj", inner, offsets)
        out = out if absent is None else out.masked_fill(absent, 0.0)
        if getattr(self, "has_post_expert_norm", False):
            norm: Any = self.post_expert_norm
            out = norm(out)
        of_rows = weights.reshape(-1)[order.indices]
        if absent is not None:
            of_rows = of_rows.masked_fill(absent[:, 0], 0.0)
        weighted = out * of_rows[:, None]
        back = torch.empty_like(order.indices)
        back[order.indices] = torch.arange(len(back), dtype=back.dtype, device=back.device)
        # summed by reshaping, in an order that does not depend on when rows arrive
        total = weighted[back].view(-1, top_k, weighted.shape[-1]).sum(1)
        return total.to(hidden_states.dtype)


def expert_offsets(experts: Tensor, count: int) -> Tensor:
    """Where each expert's rows begin and the last one's end, int32 [count + 1]. experts: sorted."""
    return torch.searchsorted(
        experts, torch.arange(count + 1, dtype=experts.dtype, device=experts.device), out_int32=True
    )


def _routing(routing: tuple[Tensor, ...], named: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Indices and weights, in the order of the interface or by name: models call them differently."""
    by_name = sorted(named.items(), key=lambda item: "ind" not in item[0])
    chosen, weights = (*routing, *(value for _, value in by_name))
    return chosen, weights


def _projected(module: QuantizedExperts, name: str, rows: Tensor, offsets: Tensor) -> Tensor:
    """A projection of every expert: by its table, or in high precision if it was excluded."""
    bias: Tensor | None = getattr(module, f"{name}_bias") if module.has_bias else None
    layer = module.quantization.quantized_now(name)
    if layer is not None:
        return multiply(layer, rows, offsets, bias)
    weight = local_experts(getattr(module, name), name)[0]
    bias = None if bias is None else local_experts(bias, f"the bias of {name}")[0]
    weight = weight if module.is_transposed else weight.transpose(1, 2)
    dtype = autocast_dtype(rows)
    return unquantized(rows.to(dtype), weight.to(dtype), bias, offsets)


def unquantized(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """The same product in high precision. weight: [E, K, N]."""
    y = torch.nn.functional.grouped_mm(rows, weight, offs=offsets[1:])
    if bias is None:
        return y
    expert = torch.searchsorted(
        offsets[1:], torch.arange(len(rows), dtype=offsets.dtype, device=rows.device), right=True
    )
    return y + bias[expert.clamp(max=len(bias) - 1)].to(y.dtype)
