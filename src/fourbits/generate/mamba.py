"""A Mamba layer with a cache: of whole prompts, and of one token per sequence."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fourbits.generate.cache import MambaCache
from fourbits.model.mamba2 import Mamba2, scan_inputs, time_steps
from fourbits.model.ops.gated_norm.op import gated_group_norm

#: tokens of a prompt whose contributions to the state are added at once
_SPAN = 256


def scan_prompts(
    mixer: Mamba2, x: Tensor, kept: MambaCache, lengths: Tensor, documents: Tensor | None
) -> Tensor:
    """The mixer's own forward pass from the first token on, [B, T, D] -> [B, T, D]; fills the cache.

    lengths: tokens of each row, int64 [B]; what follows them is padding. documents: int [B, T] or None.
    """
    projected = mixer.in_proj(x)
    counted = torch.arange(x.shape[1], device=x.device, dtype=torch.int64) < lengths[:, None]
    if documents is not None:  # what a next token of the last document still sees
        counted = counted & (documents == documents.gather(1, lengths[:, None] - 1))
    _, xbc, dt = _parts(mixer, projected)
    width = kept.inputs.shape[1]
    padded = F.pad(xbc * counted[..., None], (0, 0, width, 0))
    places = lengths[:, None] + torch.arange(width, device=lengths.device, dtype=torch.int64)
    kept.inputs.copy_(padded.gather(1, places[..., None].expand(-1, -1, xbc.shape[-1])))
    u, b, _ = _scan_inputs(mixer, xbc, documents, mixer.fused(projected))
    dt = time_steps(dt, mixer.dt_bias, mixer.min_time_step) * counted[..., None]
    kept.state.copy_(final_state(u, dt, -mixer.A_log.exp(), b))
    return mixer.out_proj(mixer.core(projected, documents))


def scan_token(mixer: Mamba2, x: Tensor, kept: MambaCache, begins: Tensor) -> Tensor:
    """One more token per row, [B, 1, D] -> [B, 1, D]; updates the cache.

    begins: rows whose token begins a document, bool [B].
    """
    projected = mixer.in_proj(x)
    fused = mixer.fused(projected)
    z, xbc, dt = _parts(mixer, projected)
    reach = torch.cat((kept.inputs.masked_fill(begins[:, None, None], 0), xbc), dim=1)
    kept.inputs.copy_(reach[:, 1:])
    u, b, c = (part[:, -1].float() for part in _scan_inputs(mixer, reach, None, fused))
    b, c = (part.repeat_interleave(u.shape[1] // part.shape[1], dim=1) for part in (b, c))  # [B, H, N]
    dt = time_steps(dt, mixer.dt_bias, mixer.min_time_step)[:, 0]
    decay = torch.exp(dt * -mixer.A_log.exp())[..., None, None]
    state = kept.state.masked_fill(begins[:, None, None, None], 0)
    state = decay * state + (dt[..., None] * b)[..., None] * u[:, :, None]
    kept.state.copy_(state)
    y = ((state * c[..., None]).sum(2) + mixer.D[:, None] * u).flatten(1)[:, None]
    y = y.to(projected.dtype) if fused else y  # as the kernels round
    y = gated_group_norm(y, z, mixer.norm_weight, mixer.num_groups, mixer.eps, fused)
    return mixer.out_proj(y.to(projected.dtype))


def final_state(x: Tensor, dt: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The scan's state after its last token: the sum of b dt x, each decayed by the tokens after it.

    x: [B, T, H, P]; dt: fp32 [B, T, H], 0 for tokens that do not count; a: [H] < 0; b: [B, T, G, N]
    -> fp32 [B, H, N, P].
    """
    batch, _, heads, head_dim = x.shape
    state = x.new_zeros(batch, heads, b.shape[-1], head_dim, dtype=torch.float32)
    parts = (part.split(_SPAN, dim=1) for part in (x.float(), dt, b.float()))
    for u, step, write in zip(*parts, strict=True):
        exponents = step * a
        after = F.pad(exponents[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1)
        weight = ((after.exp() * step)[..., None] * u).unflatten(2, (write.shape[2], -1))
        added = torch.einsum("btgn,btghp->bghnp", write, weight).flatten(1, 2)
        state = exponents.sum(1).exp()[..., None, None] * state + added
    return state


def _parts(mixer: Mamba2, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z, x | B | C and dt of in_proj's output."""
    sizes = len(mixer.norm_weight), len(mixer.conv_bias), len(mixer.A_log)
    z, xbc, dt = projected.split(sizes, dim=-1)
    return z, xbc, dt


def _scan_inputs(
    mixer: Mamba2, xbc: Tensor, documents: Tensor | None, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    taps, bias, heads = mixer.taps(), mixer.conv_bias, len(mixer.A_log)
    width = len(mixer.norm_weight)
    return scan_inputs(xbc, taps, bias, heads, width, mixer.num_groups, documents, fused)
