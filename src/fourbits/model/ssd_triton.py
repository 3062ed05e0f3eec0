"""Launches of the scan's kernels: decays, states by one walk, then all chunks at once.

Forward and backward choose their chunks apart: the backward pass makes the states again, which costs less
than to keep them, so each takes the length that moves the fewest bytes within its registers.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# (kernels are launched with the options of their compiler)

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fourbits.model.ssd_backward_triton import groups_kernel, inputs_kernel, steps_kernel
from fourbits.model.ssd_decays_triton import decays_kernel
from fourbits.model.ssd_output_triton import output_kernel
from fourbits.model.ssd_states_triton import states_kernel
from fourbits.model.ssd_tuning import Launch, Tuning, tuning_of

INTERPRETED = type(states_kernel) is not triton.JITFunction
_DECAY_HEADS = 16


class Decays(NamedTuple):
    """What `decays_kernel` writes."""

    table: Tensor
    chunk: Tensor
    segment: Tensor | None


def forward(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    starts: Tensor | None,
    tuning: Tuning | None = None,
) -> Tensor:
    """y [B, T, H, P], contiguous, in x's dtype.

    x: [B, T, H, P]; b, c: [B, T, G, N]; bf16 or fp32, of one dtype; dt: fp32 [B, T, H]; a, d: fp32
    [H]; starts: bool [B, T]. All with unit stride along the last axis.
    """
    tuning = tuning or tuning_of(x.device)["forward"]
    decays = _decays(dt, a, starts, tuning.chunk)
    states, _ = _states(x, b, decays, tuning)
    y = x.new_empty(x.shape)
    batch, length, heads, head_dim = x.shape
    chunks, heads_per_group = decays.chunk.shape[2], heads // b.shape[2]
    together, (main, tail) = heads_per_group, _columns(head_dim)
    output_kernel[(heads // together, chunks, batch)](
        *_strided(x, b, c),
        d,
        decays.table,
        decays.segment,
        states,
        y,
        length,
        heads,
        chunks,
        heads_per_group,
        together,
        P=head_dim,
        N=b.shape[3],
        HAS_STARTS=starts is not None,
        Q=tuning.chunk,
        BP=main,
        BT=tail,
        BN=_block(b.shape[3]),
        **_fitting(tuning.visit, (main + tail) * _block(b.shape[3])).options,
    )
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    starts: Tensor | None,
    tuning: Tuning | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, ddt, da, db, dc, dd, contiguous, in the dtypes of what they belong to. Arguments: see `forward`."""
    tuning = tuning or tuning_of(x.device)["backward"]
    decays = _decays(dt, a, starts, tuning.chunk)
    states, _ = _states(x, b, decays, tuning)
    ends, whole = _states(dy, c, decays, tuning, starts=states)
    batch, length, heads, head_dim = x.shape
    chunks, groups, size = decays.chunk.shape[2], b.shape[2], b.shape[3]
    part_n = min(tuning.sums.n, _block(size))
    parts = triton.cdiv(size, part_n)
    new = functools.partial(torch.empty, dtype=torch.float32, device=x.device)
    dx, db, dc = x.new_empty(x.shape), b.new_empty(b.shape), c.new_empty(c.shape)
    ddt, da, dd = new((batch, length, heads)), new((batch, chunks, heads)), new((batch, chunks, heads))
    within = new((batch, heads, 3, chunks * tuning.chunk))
    across = new((batch, parts, heads, 2, chunks * tuning.chunk))
    dscores = x.new_empty((batch, chunks, groups, tuning.chunk, tuning.chunk))
    sizes = (length, heads, chunks, heads // groups, groups, head_dim, size)
    main, tail = _columns(head_dim)
    blocks = {"Q": tuning.chunk, "BP": main, "BT": tail}
    read = _strided(dy, x, b, c)
    inputs_kernel[(groups, chunks, batch)](
        *read,
        d,
        decays.table,
        decays.segment,
        ends,
        dx,
        within,
        dscores,
        *sizes,
        HAS_STARTS=starts is not None,
        **blocks,
        BN=_block(size),
        **_fitting(tuning.visit, (main + tail) * _block(size)).options,
    )
    groups_kernel[(parts * groups, chunks, batch)](
        *read,
        decays.table,
        dscores,
        states,
        ends,
        db,
        dc,
        across,
        *sizes,
        **blocks,
        BN=part_n,
        **tuning.sums.launch.options,
    )
    steps_kernel[(chunks, triton.cdiv(heads, _DECAY_HEADS), batch)](
        a,
        decays.table,
        decays.chunk,
        within,
        across,
        whole,
        ddt,
        da,
        dd,
        length,
        heads,
        chunks,
        PARTS=parts,
        WALKS=whole.shape[2],
        Q=tuning.chunk,
        HEADS=_DECAY_HEADS,
        num_warps=4,
    )
    return dx, ddt, da.sum((0, 1)), db, dc, dd.sum((0, 1))


def _decays(dt: Tensor, a: Tensor, starts: Tensor | None, chunk: int) -> Decays:
    batch, length, heads = dt.shape
    chunks = triton.cdiv(length, chunk)
    empty = functools.partial(torch.empty, device=dt.device)
    table = empty((batch, heads, 5, chunks * chunk), dtype=torch.float32)
    whole = empty((batch, heads, chunks), dtype=torch.float32)
    segment = None if starts is None else empty((batch, chunks * chunk), dtype=torch.int32)
    decays_kernel[(chunks, triton.cdiv(heads, _DECAY_HEADS), batch)](
        dt,
        dt.stride(0),
        dt.stride(1),
        a,
        None if starts is None else starts.view(torch.int8),
        table,
        whole,
        segment,
        length,
        heads,
        chunks,
        HAS_STARTS=starts is not None,
        Q=chunk,
        HEADS=_DECAY_HEADS,
        num_warps=4,
    )
    return Decays(table, whole, segment)


def _states(
    x: Tensor, b: Tensor, decays: Decays, tuning: Tuning, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """States at the starts of chunks; with `starts` gradients at their ends, and what both make together."""
    batch, length, heads, head_dim = x.shape
    groups, size = b.shape[2:]
    chunks, walk = decays.chunk.shape[2], tuning.walk
    states = x.new_empty((batch, chunks, heads, head_dim, size))
    part_p, part_n = min(walk.p, _block(head_dim)), min(walk.n, _block(size))
    parts = (triton.cdiv(head_dim, part_p), triton.cdiv(size, part_n))
    whole = decays.chunk.new_empty((batch, heads, parts[0] * parts[1], chunks))
    states_kernel[(batch * heads, *parts)](
        *_strided(x, b),
        decays.table,
        decays.chunk,
        states,
        starts,
        whole,
        length,
        heads,
        chunks,
        heads // groups,
        P=head_dim,
        N=size,
        BACKWARDS=starts is not None,
        Q=tuning.chunk,
        BP=part_p,
        BN=part_n,
        **walk.launch.options,
    )
    return states, whole


def _strided(*tensors: Tensor) -> list[Tensor | int]:
    """Each tensor and its strides but the last, which is 1."""
    return [value for x in tensors for value in (x, *x.stride()[:-1])]


def _fitting(launch: Launch, state: int) -> Launch:
    """A launch whose loads fit in shared memory: of states of more elements than 96 x 128 no third stage."""
    return launch if state <= 96 * 128 else launch._replace(stages=min(launch.stages, 2))


def _block(size: int) -> int:
    """The power of two that holds `size`, at least what tensor cores take."""
    return max(16, 1 << (size - 1).bit_length())


def _columns(size: int) -> tuple[int, int]:
    """Powers of two that hold `size` together: the larger, and the one for what it leaves, or 0."""
    whole = _block(size)
    main = whole // 2
    if main < 16 or main + _block(size - main) >= whole:
        return whole, 0
    return main, _block(size - main)
