"""The SSD scan in chunks, in PyTorch: matrix products instead of a loop over tokens.

With L_t the running sum of the log-decays dt_t a, the recurrence of reference.py is the masked product

    y_t = sum_{s <= t} exp(L_t - L_s) (c_t . b_s) dt_s x_s            (arXiv:2405.21060 section 6),

plus the skip connection d x_t. In chunks of Q tokens it has three parts: that product within a chunk (Q x Q);
the state S at the chunk's end, from x^T b; and the contribution of the state at its start, c S^T. Only the
state passing from chunk to chunk is a recurrence, over T/Q steps, which is computed as a masked product too.
Any Q gives the same result up to rounding. Every exponent is a sum of log-decays over a span, so it is <= 0
and nothing overflows. Spans that run backwards are set to -inf before exp: masking after exp would compute
0 * inf.

Where a document starts, RESET is added to the log-decay. So no state of an earlier document survives in any
of these products, and everything stays finite (-inf would lead to inf - inf).

The backward pass is explicit. The log-decay of token u scales everything written before u and read at u or
later, so its gradient is the sum of these terms, and of no others:

    dlog_u = sum_{s < u <= t} e_ts + sum_{t >= u} carried_t + sum_{s < u} added_s + exp(total) <dS_end, S>

e_ts is the contribution of token s to y_t, carried_t that of the state S at the chunk's start, and added_s
that of token s to the state at the chunk's end, each times the gradient of what it contributes to. The
gradient of L_t has a shorter form, <dy_t, y_t> - <d(dt_t x_t), dt_t x_t>, but both products contain e_tt, on
which no decay acts. Where decays are strong, it exceeds the remainder by more digits than FP32 has.

Letters: B sequences, Z chunks, Q tokens of a chunk, G groups, R heads per group, P head dim, N states.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# exp(-10,000) is 0 even in FP64. A sum of 10,000 of them still leaves exponents accurate to 2^-26: FP64 has
# 53 bits, and 10^8 takes 27.
RESET = -1e4


def chunked_ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    chunk_size: int,
    starts: Tensor | None,
) -> Tensor:
    """Scan in chunks of chunk_size tokens, in FP32 or FP64. Arguments: see `op.ssd`."""
    length, groups = x.shape[1], b.shape[2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    skip = d.to(dtype)[:, None] * x
    x, dt, b, c = (_in_chunks(t.to(dtype), min(chunk_size, length)) for t in (x, dt, b, c))
    by_group = (groups, x.shape[3] // groups)
    x, dt, a = x.unflatten(3, by_group), dt.unflatten(3, by_group), a.to(dtype).unflatten(0, by_group)
    resets = None if starts is None else _in_chunks(starts * x.new_tensor(RESET).double(), x.shape[2])
    y = _Scan.apply(x, dt, a, b, c, resets)
    return y.flatten(3, 4).flatten(1, 2)[:, :length] + skip


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, T, ...] -> [B, Z, Q, ...], padded with zeros: a token with dt = 0 neither decays nor writes."""
    padding = -x.shape[1] % chunk
    if padding:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
    return x.unflatten(1, (-1, chunk))


class _Scan(torch.autograd.Function):
    """x: [B, Z, Q, G, R, P]; dt: [B, Z, Q, G, R]; a: [G, R]; b, c: [B, Z, Q, G, N]; resets: [B, Z, Q].

    -> like x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, resets: Tensor | None
    ) -> Tensor:
        decays, heads = _decays(dt, a, resets), x.shape[-2:]
        written = x * dt[..., None]
        scores = _by_group(c) @ _by_group(b).mT  # [B, Z, G, Q, Q], shared by the heads of a group
        within = (scores[:, :, :, None] * decays.within) @ _by_head(written)
        added = _by_group((written * decays.to_end).flatten(-2)).mT @ _by_group(b)  # [B, Z, G, R*P, N]
        start = _pass_on(added, decays.between)
        carried = _by_group(_by_group(c) @ start.mT).unflatten(-1, heads)
        carried = carried * decays.from_start
        ctx.save_for_backward(x, dt, a, b, c, start, carried, resets)
        return _by_head_inverse(within) + carried

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, start, carried, resets = ctx.saved_tensors
        decays, heads = _decays(dt, a, resets), x.shape[-2:]
        written = x * dt[..., None]
        b, c = _by_group(b), _by_group(c)

        scores = (c @ b.mT)[:, :, :, None]
        decayed = (_by_head(dy) @ _by_head(written).mT) * decays.within
        dwithin = (scores * decays.within).mT @ _by_head(dy)
        dcarried = _by_group((dy * decays.from_start).flatten(-2))  # [B, Z, G, Q, R*P]
        dend = _pass_on(dcarried.mT @ c, decays.between.mT)
        dadded = _by_group(b @ dend.mT).unflatten(-1, heads) * decays.to_end
        dwritten = _by_head_inverse(dwithin) + dadded

        dscores = decayed.sum(3)
        db = dscores.mT @ c + _by_group((written * decays.to_end).flatten(-2)) @ dend
        dc = dscores @ b + dcarried @ start
        whole = decays.from_start[:, :, -1, ..., 0] * (dend * start).unflatten(3, heads).sum((-1, -2))
        dlog = _across(decayed * scores) + _suffix_sum((dy * carried).sum(-1), 2)
        dlog = dlog + _prefix_sum((dadded * written).sum(-1), 2) + whole[:, :, None]
        along_x = (dwritten * x).sum(-1)
        dx, ddt, da = dwritten * dt[..., None], dlog * a + along_x, (dlog * dt).sum((0, 1, 2))
        return dx, ddt, da, _by_group(db), _by_group(dc), None


class _Decays(NamedTuple):
    within: Tensor  # [B, Z, G, R, Q (t), Q (s)]: from token s to token t, 0 where s > t
    from_start: Tensor  # [B, Z, Q, G, R, 1]: from the chunk's start to a token
    to_end: Tensor  # [B, Z, Q, G, R, 1]: from a token to the chunk's end
    between: Tensor  # [B, G, R, Z (z), Z (s)]: from the end of chunk s to the start of chunk z, 0 if s >= z


def _decays(dt: Tensor, a: Tensor, resets: Tensor | None) -> _Decays:
    # FP64 up to the exponents: a strong decay makes L large, and a difference of two large FP32 numbers would
    # carry the rounding error of L into all later tokens of the chunk.
    log = dt.double() * a.double()
    log = (log if resets is None else log + resets[..., None, None]).cumsum(2)
    total = log[:, :, -1:]
    within = log.permute(0, 1, 3, 4, 2)
    tokens = torch.arange(log.shape[2], device=log.device, dtype=torch.int64)
    within = _exp(within[..., :, None] - within[..., None, :], tokens[:, None] < tokens, dt.dtype)

    chunks = torch.arange(log.shape[1], device=log.device, dtype=torch.int64)
    end = total.squeeze(2).cumsum(1)
    start = F.pad(end, (0, 0, 0, 0, 1, -1))
    between = start.permute(0, 2, 3, 1)[..., :, None] - end.permute(0, 2, 3, 1)[..., None, :]
    between = _exp(between, chunks[:, None] <= chunks, dt.dtype)
    return _Decays(
        within, log.to(dt.dtype).exp()[..., None], (total - log).to(dt.dtype).exp()[..., None], between
    )


def _exp(spans: Tensor, backwards: Tensor, dtype: torch.dtype) -> Tensor:
    return spans.to(dtype).masked_fill(backwards, float("-inf")).exp()


def _pass_on(states: Tensor, decay: Tensor) -> Tensor:
    """The sum over s of decay[z, s] states[s]. [B, Z, G, R*P, N], [B, G, R, Z, Z] -> [B, Z, G, R*P, N]."""
    by_head = states.unflatten(3, (decay.shape[2], -1)).permute(0, 2, 3, 1, 4, 5)  # [B, G, R, Z, P, N]
    summed = (decay @ by_head.flatten(4)).view_as(by_head)
    return summed.permute(0, 3, 1, 2, 4, 5).flatten(3, 4)


def _across(pairs: Tensor) -> Tensor:
    """Sums over s < u <= t. [B, Z, G, R, Q (t), Q (s)], 0 where s > t -> [B, Z, Q (u), G, R].

    A span from s to t leads from the earlier half to the later half of one block of 2, 4, ... tokens. In a
    block, token u of the earlier half adds columns s < u, and one of the later half adds rows t >= u.
    """
    chunk = pairs.shape[-1]
    size = 1 << (chunk - 1).bit_length()
    if padding := size - chunk:
        pairs = F.pad(pairs, (0, padding, 0, padding))
    sums = pairs.new_zeros(pairs.shape[:-1])
    while size > 1:
        blocks = pairs.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # [..., block, t, block, s]
        block = torch.arange(blocks.shape[-2], device=pairs.device, dtype=torch.int64)
        spans = blocks[..., block, size // 2 :, block, : size // 2]  # [block, ..., t, s]
        earlier, later = _prefix_sum(spans.sum(-2), -1), _suffix_sum(spans.sum(-1), -1)
        sums = sums + torch.cat((earlier, later), -1).movedim(0, -2).flatten(-2)
        size //= 2
    return sums[..., :chunk].permute(0, 1, 4, 2, 3)


def _suffix_sum(x: Tensor, dim: int) -> Tensor:
    """Sums of x over this position and the later ones."""
    return x.flip(dim).cumsum(dim).flip(dim)


def _prefix_sum(x: Tensor, dim: int) -> Tensor:
    """Sums of x over the earlier positions. Subtracting x from sums that include it would lose digits."""
    sums = x.cumsum(dim)
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, 1)), sums.narrow(dim, 0, x.shape[dim] - 1)), dim)


def _by_group(x: Tensor) -> Tensor:
    """[B, Z, Q, G, ...] <-> [B, Z, G, Q, ...]."""
    return x.transpose(2, 3)


def _by_head(x: Tensor) -> Tensor:
    """[B, Z, Q, G, R, P] -> [B, Z, G, R, Q, P]."""
    return x.permute(0, 1, 3, 4, 2, 5)


def _by_head_inverse(x: Tensor) -> Tensor:
    """[B, Z, G, R, Q, P] -> [B, Z, Q, G, R, P]."""
    return x.permute(0, 1, 4, 2, 3, 5)
