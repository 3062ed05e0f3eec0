"""The coefficients of layers whose input is quantized with error feedback; docs/nvfp4.md, section 25.

They follow from the weight alone, change as slowly as it does, and are recomputed at some steps only. A
checkpoint holds them, so that a resumed run continues with the bits of the one that was not interrupted.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fourbits.linear.layer_state import LayerState
from fourbits.quant.feedback_coefficients import batched_coefficients, in_order
from fourbits.recipe.recipe import GemmTable, table_from_text

#: steps from one update to the next, unless the spec sets them
_INTERVAL = 50
#: the largest number of weights whose coefficients are computed at a time
_AT_ONCE = 1 << 26


def span_of(state: LayerState) -> int:
    """The span of a layer's error feedback in its current phase; 0 without."""
    return 0 if state.plain else state.feedback.span


def layers_with_feedback(layers: Sequence[Any]) -> tuple[Any, ...]:
    """The converted layers whose input has error feedback."""
    return tuple(layer for layer in layers if span_of(layer.quantization))


def unsupported_feedback(table: GemmTable, holds_several: bool) -> str | None:
    """Why a layer cannot have the error feedback that its table asks for, or None."""
    if table.fprop.lhs.error_feedback and holds_several:
        return "error feedback does not support experts whose weights are stacked"
    return None


@torch.no_grad()
def update_coefficients(layers: Sequence[Any], step: int) -> None:
    """Give the layers the coefficients of a step: new ones where that is due, or where there are none.

    Raises ValueError for a layer that is a shard, or whose weight arrives quantized.
    """
    pending: dict[tuple[Any, ...], list[Any]] = {}
    for layer in layers:
        state, weight = layer.quantization, layer.weight
        if weight.is_meta:  # a model without values, such as an export reads its recipe from
            continue
        known = state.feedback.coefficients
        if known is None or known.device != weight.device or _is_due(state, step):
            _require_whole(layer)
            pending.setdefault((weight.shape, weight.device, state.feedback.span), []).append(layer)
    for (shape, _, span), group in pending.items():
        count = max(1, _AT_ONCE // max(1, shape.numel()))
        for first in range(0, len(group), count):
            part = group[first : first + count]
            found = batched_coefficients(torch.stack([layer.weight.detach().float() for layer in part]), span)
            for layer, coefficients in zip(part, found, strict=True):
                _set(layer.quantization, coefficients, step)


def _is_due(state: LayerState, step: int) -> bool:
    """Whether new coefficients are due: at 0, 1, 2, 4, 8 ... and at multiples of the interval."""
    interval = table_from_text(state.table).fprop.lhs.feedback_interval or _INTERVAL
    due = step % interval == 0 or (step < interval and step & (step - 1) == 0)
    return due and state.feedback.step != step


def _set(state: LayerState, coefficients: Tensor, step: int) -> None:
    """Store new coefficients, in the tensor of the old ones if it fits, as a CUDA graph may read that."""
    feedback = state.feedback
    old, feedback.step = feedback.coefficients, step
    if old is not None and old.shape == coefficients.shape and old.device == coefficients.device:
        old.copy_(coefficients)
    else:
        feedback.coefficients = in_order(coefficients.clone())


def restore_coefficients(layer: Any, saved: Tensor) -> None:
    """Give a layer the coefficients of a checkpoint: int8 [K, span]."""
    _set(layer.quantization, saved.to(layer.weight.device), -1)


def _require_whole(layer: Any) -> None:
    state: LayerState = layer.quantization
    plain = type(layer.weight) in (nn.Parameter, Tensor)
    if not plain or state.shard is not None or state.weight_source is not None:
        raise ValueError(
            "set_step: error feedback needs a layer's whole weight, which is not available: layer "
            f"{state.layer} has a {type(layer.weight).__name__}. Use a recipe without error_feedback where "
            "weights are sharded."
        )
