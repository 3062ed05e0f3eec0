"""Launches of the scan's kernels: decays, then states in one sweep, then all chunks in parallel.

Forward and backward have chunks of different lengths. The backward pass recomputes the states, which costs
less than storing them, so each pass uses the length that moves the fewest bytes and fits in its registers.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# (launches also pass compiler options)

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fourbits.model.ops.ssd.kernels.backward_triton import groups_kernel, inputs_kernel, steps_kernel
from fourbits.model.ops.ssd.kernels.decays_triton import decays_kernel
from fourbits.model.ops.ssd.kernels.launch_config import CompilerOptions, LaunchConfig, launch_config
from fourbits.model.ops.ssd.kernels.output_triton import output_kernel
from fourbits.model.ops.ssd.kernels.states_triton import states_kernel

INTERPRETED = type(states_kernel) is not triton.JITFunction
_DECAY_HEADS = 16


class Decays(NamedTuple):
    """The outputs of `decays_kernel`."""

    table: Tensor
    chunk: Tensor
    segment: Tensor | None


class _Sizes(NamedTuple):
    """Arguments of the backward kernels, in their order."""

    length: int
    heads: int
    chunks: int
    heads_per_group: int
    groups: int
    head_dim: int
    state: int


def forward(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    starts: Tensor | None,
    config: LaunchConfig | None = None,
    final: Tensor | None = None,
) -> Tensor:
    """y [B, T, H, P], contiguous, in x's dtype.

    x: [B, T, H, P]; b, c: [B, T, G, N]; bf16 or fp32, of one dtype; dt: fp32 [B, T, H]; a, d: fp32
    [H]; starts: bool [B, T]. All with unit stride along the last axis. final: receives the state after
    the last token, fp32 [B, H, P, N], contiguous.
    """
    config = config or launch_config(x.device)["forward"]
    decays = _decays(dt, a, starts, config.chunk)
    states, _ = _states(x, b, decays, config, final=final)
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
        Q=config.chunk,
        BP=main,
        BT=tail,
        BN=_block(b.shape[3]),
        **_fitting(config.chunks, (main + tail) * _block(b.shape[3])).named,
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
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, ddt, da, db, dc, dd, contiguous, in the dtypes of the arguments. Arguments: see `forward`."""
    config = config or launch_config(x.device)["backward"]
    decays = _decays(dt, a, starts, config.chunk)
    states, _ = _states(x, b, decays, config)
    ends, products = _states(dy, c, decays, config, starts=states)
    read, sizes = _strided(dy, x, b, c), _sizes(x, b, decays)
    dx, within, dscores = _input_gradients(read, sizes, x, d, starts, decays, ends, config)
    db, dc, across = _group_gradients(read, sizes, b, c, dscores, states, ends, decays, config)
    ddt, da, dd = _decay_gradients(sizes, dt, a, decays, within, across, products, config.chunk)
    return dx, ddt, da.sum((0, 1)), db, dc, dd.sum((0, 1))


def _input_gradients(
    read: Sequence[Tensor | int],
    sizes: _Sizes,
    x: Tensor,
    d: Tensor,
    starts: Tensor | None,
    decays: Decays,
    ends: Tensor,
    config: LaunchConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, the terms of the decays within chunks, fp32 [B, H, 3, Z Q], and of the scores [B, Z, G, Q, Q].

    read: dy, x, b and c with their strides.
    """
    batch, padded = x.shape[0], sizes.chunks * config.chunk
    dx = x.new_empty(x.shape)
    within = decays.table.new_empty((batch, sizes.heads, 3, padded))
    dscores = x.new_empty((batch, sizes.chunks, sizes.groups, config.chunk, config.chunk))
    main, tail = _columns(sizes.head_dim)
    inputs_kernel[(sizes.groups, sizes.chunks, batch)](
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
        Q=config.chunk,
        BP=main,
        BT=tail,
        BN=_block(sizes.state),
        **_fitting(config.chunks, (main + tail) * _block(sizes.state)).named,
    )
    return dx, within, dscores


def _group_gradients(
    read: Sequence[Tensor | int],
    sizes: _Sizes,
    b: Tensor,
    c: Tensor,
    dscores: Tensor,
    states: Tensor,
    ends: Tensor,
    decays: Decays,
    config: LaunchConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """db, dc and the terms of the decays across chunks, fp32 [B, parts of the state, H, 2, Z Q]."""
    batch, part_n = b.shape[0], min(config.groups.n, _block(sizes.state))
    parts = triton.cdiv(sizes.state, part_n)
    db, dc = b.new_empty(b.shape), c.new_empty(c.shape)
    across = decays.table.new_empty((batch, parts, sizes.heads, 2, sizes.chunks * config.chunk))
    main, tail = _columns(sizes.head_dim)
    groups_kernel[(parts * sizes.groups, sizes.chunks, batch)](
        *read,
        decays.table,
        dscores,
        states,
        ends,
        db,
        dc,
        across,
        *sizes,
        Q=config.chunk,
        BP=main,
        BT=tail,
        BN=part_n,
        **config.groups.compiler.named,
    )
    return db, dc, across


def _decay_gradients(
    sizes: _Sizes,
    dt: Tensor,
    a: Tensor,
    decays: Decays,
    within: Tensor,
    across: Tensor,
    products: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """ddt [B, T, H], and per chunk da and dd [B, Z, H]; fp32."""
    batch, length, heads, chunks = dt.shape[0], sizes.length, sizes.heads, sizes.chunks
    new = decays.table.new_empty
    ddt, da, dd = new((batch, length, heads)), new((batch, chunks, heads)), new((batch, chunks, heads))
    steps_kernel[(chunks, triton.cdiv(heads, _DECAY_HEADS), batch)](
        a,
        decays.table,
        decays.chunk,
        within,
        across,
        products,
        ddt,
        da,
        dd,
        length,
        heads,
        chunks,
        PARTS=across.shape[1],
        TILES=products.shape[2],
        Q=chunk,
        HEADS=_DECAY_HEADS,
        num_warps=4,
    )
    return ddt, da, dd


def _sizes(x: Tensor, b: Tensor, decays: Decays) -> _Sizes:
    _, length, heads, head_dim = x.shape
    chunks, groups, state = decays.chunk.shape[2], b.shape[2], b.shape[3]
    return _Sizes(length, heads, chunks, heads // groups, groups, head_dim, state)


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
    x: Tensor,
    b: Tensor,
    decays: Decays,
    config: LaunchConfig,
    starts: Tensor | None = None,
    final: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """States at chunk starts; given these as `starts`, gradients at chunk ends and products of both."""
    batch, length, heads, head_dim = x.shape
    groups, size = b.shape[2:]
    chunks, states_config = decays.chunk.shape[2], config.states
    states = x.new_empty((batch, chunks, heads, head_dim, size))
    part_p, part_n = min(states_config.p, _block(head_dim)), min(states_config.n, _block(size))
    parts = (triton.cdiv(head_dim, part_p), triton.cdiv(size, part_n))
    products = decays.chunk.new_empty((batch, heads, parts[0] * parts[1], chunks))
    states_kernel[(batch * heads, *parts)](
        *_strided(x, b),
        decays.table,
        decays.chunk,
        states,
        final,
        starts,
        products,
        length,
        heads,
        chunks,
        heads // groups,
        P=head_dim,
        N=size,
        BACKWARDS=starts is not None,
        Q=config.chunk,
        BP=part_p,
        BN=part_n,
        **states_config.compiler.named,
    )
    return states, products


def _strided(*tensors: Tensor) -> list[Tensor | int]:
    """Each tensor with its strides, except the last one, which is 1."""
    return [value for x in tensors for value in (x, *x.stride()[:-1])]


def _fitting(options: CompilerOptions, state: int) -> CompilerOptions:
    """Options whose loads fit in shared memory: at most two stages for states larger than 96 x 128."""
    return options if state <= 96 * 128 else options._replace(stages=min(options.stages, 2))


def _block(size: int) -> int:
    """The smallest power of two >= `size`, and at least 16, the smallest tile of tensor cores."""
    return max(16, 1 << (size - 1).bit_length())


def _columns(size: int) -> tuple[int, int]:
    """Powers of two that add up to at least `size`: the larger, and one for the remainder, or 0."""
    whole = _block(size)
    main = whole // 2
    if main < 16 or main + _block(size - main) >= whole:
        return whole, 0
    return main, _block(size - main)
