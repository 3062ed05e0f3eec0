"""A Mamba layer with a cache, for whole prompts and for one token per sequence."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fourbits.generate.cache import MambaCache
from fourbits.model.documents import begins_document
from fourbits.model.mamba2 import Mamba2, scan_inputs, time_steps
from fourbits.model.ops.gated_norm.op import gated_group_norm
from fourbits.model.ops.inputs import at_least_fp32
from fourbits.model.ops.mamba_step.op import mamba_step
from fourbits.model.ops.mamba_step.weights import StepWeights
from fourbits.model.ops.ssd.op import ssd, ssd_with_state

#: number of tokens whose contributions to the state are added at once
_SPAN = 256


def scan_prompts(
    mixer: Mamba2, x: Tensor, kept: MambaCache, lengths: Tensor, documents: Tensor | None
) -> Tensor:
    """The mixer's forward pass over whole prompts, [B, T, D] -> [B, T, D]; fills the cache.

    lengths: tokens of each row, int64 [B]; the rest is padding. documents: int [B, T] or None.
    """
    projected = mixer.in_proj(x)
    z, xbc, dt = projected.split(step_weights(mixer).widths, dim=-1)
    counted = torch.arange(x.shape[1], device=x.device, dtype=torch.int64) < lengths[:, None]
    starts, seen = None, counted
    if documents is not None:
        starts = begins_document(documents) & counted
        # the inputs that the next token sees if it continues the last document
        seen = counted & (documents == documents.gather(1, lengths[:, None] - 1))
    _keep_inputs(kept.inputs, xbc, lengths, seen)
    fused = mixer.fused(projected)
    u, b, c = _scan_inputs(mixer, xbc, documents, fused)
    dt = time_steps(dt, mixer.dt_bias, mixer.min_time_step) * counted[..., None]
    a = -mixer.A_log.exp()
    if fused:
        y = ssd_with_state(u, dt, a, b, c, mixer.D, starts, kept.state)
    else:
        kept.state.copy_(final_state(u, dt * seen[..., None], a, b))
        y = ssd(u, dt, a, b, c, mixer.D, mixer.chunk_size, starts)
    y = gated_group_norm(y.flatten(2), z, mixer.norm_weight, mixer.num_groups, mixer.eps, fused)
    return mixer.out_proj(y.to(projected.dtype))


def scan_token(mixer: Mamba2, x: Tensor, kept: MambaCache, begins: Tensor) -> Tensor:
    """The mixer on one more token per row, [B, 1, D] -> [B, 1, D]; updates the cache.

    begins: rows whose token begins a document, bool [B].
    """
    projected = mixer.in_proj(x)
    fused = mixer.fused(projected)
    y = mamba_step(projected[:, 0], kept.inputs, kept.state, begins, step_weights(mixer), fused)
    return mixer.out_proj(y.to(projected.dtype)[:, None])


def step_weights(mixer: Mamba2) -> StepWeights:
    """The parameters of the mixer that are used between its projections."""
    return StepWeights(
        mixer.conv_weight,
        mixer.conv_bias,
        mixer.dt_bias,
        mixer.A_log,
        mixer.D,
        mixer.norm_weight,
        mixer.num_groups,
        mixer.eps,
        mixer.min_time_step,
    )


def final_state(x: Tensor, dt: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The scan's state after its last token: the sum of x dt b, each decayed by the tokens after it.

    x: [B, T, H, P]; dt: fp32 [B, T, H], 0 for tokens that do not count; a: [H] < 0; b: [B, T, G, N]
    -> fp32 [B, H, P, N].
    """
    batch, _, heads, head_dim = x.shape
    state = dt.new_zeros(batch, heads, head_dim, b.shape[-1])
    parts = (part.split(_SPAN, dim=1) for part in map(at_least_fp32, (x, dt, b)))
    for u, step, write in zip(*parts, strict=True):
        exponents = step * a
        after = F.pad(exponents[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1)
        weight = ((after.exp() * step)[..., None] * u).unflatten(2, (write.shape[2], -1))
        added = torch.einsum("btgn,btghp->bghpn", write, weight).flatten(1, 2)
        state = exponents.sum(1).exp()[..., None, None] * state + added
    return state


def _keep_inputs(kept: Tensor, xbc: Tensor, lengths: Tensor, seen: Tensor) -> None:
    """Copy the convolution's inputs at the last tokens of each row; zero where the next token sees none.

    kept: [B, W - 1, C]; xbc: [B, T, C]; seen: bool [B, T].
    """
    width = kept.shape[1]
    places = lengths[:, None] - width + torch.arange(width, device=xbc.device, dtype=torch.int64)
    inside = places.clamp(min=0)
    real = (places >= 0) & seen.gather(1, inside)
    last = xbc.gather(1, inside[..., None].expand(-1, -1, xbc.shape[-1]))
    kept.copy_(last.masked_fill(~real[..., None], 0))


def _scan_inputs(
    mixer: Mamba2, xbc: Tensor, documents: Tensor | None, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    taps, bias, heads = mixer.taps(), mixer.conv_bias, len(mixer.A_log)
    width = len(mixer.norm_weight)
    return scan_inputs(xbc, taps, bias, heads, width, mixer.num_groups, documents, fused)
