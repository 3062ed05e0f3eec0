"""One token of a Mamba-2 mixer in PyTorch, operation by operation."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fourbits.model.ops.gated_norm.op import gated_group_norm
from fourbits.model.ops.inputs import at_least_fp32
from fourbits.model.ops.mamba_step.weights import StepWeights


def mamba_step(
    projected: Tensor, inputs: Tensor, state: Tensor, begins: Tensor, weights: StepWeights
) -> Tensor:
    """[B, H*P] in FP32 (FP64 arguments stay FP64); see `op.mamba_step`."""
    z, xbc, dt = (at_least_fp32(part) for part in projected.split(weights.widths, dim=-1))
    reach = torch.cat((inputs.masked_fill(begins[:, None, None], 0).to(xbc.dtype), xbc[:, None]), dim=1)
    inputs.copy_(reach[:, 1:])
    conv = F.silu((reach * weights.conv_weight.squeeze(1).t()).sum(1) + weights.conv_bias)
    num_heads, groups = len(weights.a_log), weights.num_groups
    u, b, c = conv.split(weights.conv_widths, dim=-1)
    u = u.unflatten(-1, (num_heads, -1))
    b, c = (
        part.unflatten(-1, (groups, -1)).repeat_interleave(num_heads // groups, dim=1) for part in (b, c)
    )  # [B, H, N]
    dt = F.softplus(dt + weights.dt_bias).clamp(min=weights.min_time_step)
    decay = torch.exp(dt * -weights.a_log.exp())[..., None, None]
    before = state.masked_fill(begins[:, None, None, None], 0)
    state.copy_(decay * before + u[..., None] * (dt[..., None] * b)[:, :, None])
    y = (state * c[:, :, None]).sum(-1) + weights.d[:, None] * u
    return gated_group_norm(y.flatten(1), z, weights.norm_weight, groups, weights.eps)
