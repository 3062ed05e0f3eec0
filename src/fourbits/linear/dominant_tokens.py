"""Whether one scale per tensor fits a layer's output gradient, measured in its first backward pass.

A token whose gradient is orders of magnitude larger than all others, such as one with an embedding of exact
zeros before a norm, takes the whole range of the format: the blocks of the other tokens get a scale of zero.
The check costs a few small kernels per layer, once. Eager layers copy nothing to the host before the audit;
compiled ones copy two numbers each in their first backward pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fourbits.linear.layer_state import LayerState
from fourbits.recipe.recipe import table_from_text

#: a block of E2M1 elements has the scale zero below this share of the tensor's amax: half of E4M3's
#: smallest subnormal over its largest value, 2**-10 / 448. docs/nvfp4.md, section 6
_LOST = 2.0**-10 / 448
#: rows are as large as the tensor's amax within this factor
_LARGE = 16.0
#: reported if at least this share of blocks has the scale zero and at most this share of rows is large
_MANY_BLOCKS, _FEW_ROWS = 0.1, 0.1


#: number, out_features and in_features of a layer, under which operators of compiled graphs record its calls
CallKey = tuple[int, ...]
#: operators' measurements of layers' first output gradients, on the host; None if the recipe needs no check
gradients_seen: dict[CallKey, Tensor | None] = {}


def measure_first_gradient(state: LayerState, dy: Tensor) -> None:
    """Measure a layer's first output gradient. dy: [M, N]."""
    if _can_be_measured(dy):
        state.awaits_gradient = False
        state.gradient = _measured(dy, state.table)


def measure_first_gradient_in_graph(key: CallKey, table: str, dy: Tensor) -> None:
    """Measure a layer's first output gradient in an operator, which knows the layer's key only.

    The two numbers go to the host, once: under reduce-overhead an operator runs in the memory pool of CUDA
    graphs, which must not hold tensors that no graph returned.
    """
    if key not in gradients_seen and _can_be_measured(dy):
        shares = _measured(dy, table)
        gradients_seen[key] = None if shares is None else shares.cpu()


def _can_be_measured(dy: Tensor) -> bool:
    return dy.numel() > 0 and not (dy.is_cuda and torch.cuda.is_current_stream_capturing())


def _measured(dy: Tensor, text: str) -> Tensor | None:
    table = table_from_text(text)
    formats = {table.operand(role).format for role in ("dgrad.lhs", "wgrad.lhs")}
    affected = table.gradient_rows == "any" and "nvfp4" in formats
    return lost_blocks_and_large_rows(dy) if affected else None


def lost_blocks_and_large_rows(dy: Tensor) -> Tensor:
    """The share of a gradient's nonzero 1x16 blocks whose scale would be zero, and the share of its nonzero
    rows that are about as large as its amax, fp32 [2] on its device. dy: [M, N].
    """
    magnitude = nn.functional.pad(dy.detach().abs(), (0, -dy.shape[1] % 16))
    blocks = magnitude.unflatten(1, (-1, 16)).amax(2).float()
    rows = blocks.amax(1)
    amax = rows.amax()
    lost = _share((blocks > 0) & (blocks <= amax * _LOST), blocks > 0)
    large = _share(rows > amax / _LARGE, rows > 0)
    return torch.stack((lost, large))


def _share(counted: Tensor, of: Tensor) -> Tensor:
    """counted / all, fp32; torch divides integers to the default dtype."""
    return counted.sum().to(torch.float32) / of.sum().clamp(min=1)


def described(layers: Sequence[tuple[str, Tensor | None]]) -> tuple[str, ...]:
    """The finding, with the remedy; empty if no gradient is dominated by a few tokens.

    layers: name -> the measurement of its first output gradient.
    """
    seen = [(name, gradient.cpu()) for name, gradient in layers if gradient is not None]
    if not seen:
        return ()
    shares = torch.stack([gradient for _, gradient in seen])
    hit = [
        (lost, large, name)
        for (name, _), (lost, large) in zip(seen, shares.tolist(), strict=True)
        if lost >= _MANY_BLOCKS and large <= _FEW_ROWS
    ]
    if not hit:
        return ()
    lost, large, name = max(hit)
    return (
        f"a few tokens dominate the gradients of {len(hit)} of {len(seen)} quantized layers: in {name!r}, "
        f"{large:.1%} of the tokens have gradients within 16x of the largest, and {lost:.0%} of the blocks "
        "have a scale of zero, so the other tokens learn nothing. Such a token often has an embedding of "
        "exact zeros (padding_idx with a label): give it the label -100, or no padding_idx. Otherwise set "
        "gradient_rows: limited in the recipe (docs/convert.md).",
    )
