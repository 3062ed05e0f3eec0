"""Weights that arrive quantized, such as from an all-gather of codes and scales instead of values.

The layer multiplies by what its source returns and never quantizes its own weight. docs/nvfp4.md, section 8,
has the values that Dgrad re-quantizes where its operand is not the transpose of Fprop's.
"""

from collections.abc import Callable

from torch import Tensor, nn

from fourbits.linear.layer_state import LayerState, WeightSource, state_of
from fourbits.quant.tensor import QuantizedTensor
from fourbits.recipe.recipe import GemmTable, table_from_text


def set_weight_source(
    layer: nn.Module,
    source: WeightSource | None,
    *,
    returns: bool = False,
    values: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Give a converted layer its weight as codes and scales; None quantizes the layer's weight again.

    source: called with the layer's weight (an expert's, in groups) before each forward; returns the whole
    weight [N, K], quantized along axis 1 with the table's fprop.rhs. The weight itself is not read: only its
    shape and dtype count, and it gets the gradient. Where Dgrad does not share Fprop's operand, it
    re-quantizes that, as with source `forward`. returns: whether the source has the same weight before a
    backward pass, so that eager calls use it again and save no operand. values: (weight) -> [N, K], the
    values before quantization, for samples of the layer's health; None: the codes' own. Raises ValueError for
    a layer that is not converted, and for a recipe with corrections, a transform in Fprop, an adaptive layout
    of W, or GEMMs on FP4 tensor cores.
    """
    state = state_of(layer, "set_weight_source")
    table = table_from_text(state.table)
    if source is not None:
        check_table(table)
        if state.phases is not None:
            raise ValueError(
                "weight_source: a phase of the recipe's schedule may need the unquantized weight. Remove the "
                "schedule, or exclude the layer from its phases."
            )
    state.weight_source, state.weight_spec = source, table.fprop.rhs
    state.weight_returns, state.weight_values = returns and source is not None, values


def received_weight(state: LayerState, weight: Tensor) -> QuantizedTensor:
    """The quantized weight from a layer's source, if it has one. Raises ValueError if it does not fit."""
    assert state.weight_source is not None
    received = state.weight_source(weight)
    if not isinstance(received, QuantizedTensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"weight_source: must return a QuantizedTensor, got {type(received).__name__}. Return what "
            "fourbits.quantize returns."
        )
    rows, columns = weight.shape
    if received.axis != 1 or received.shape != (rows, columns):
        raise ValueError(
            f"weight_source: must return [{rows}, {columns}] along axis 1, got {list(received.shape)} along "
            f"axis {received.axis}. Quantize the whole weight as the layer's Fprop takes it."
        )
    if received.spec != state.weight_spec:
        raise ValueError(
            f"weight_source: the spec must be the recipe's fprop.rhs, {state.weight_spec}, got "
            f"{received.spec}. Quantize the weight with that spec."
        )
    return received


def check_table(table: GemmTable) -> None:
    """Raises ValueError for a table that needs the unquantized weight."""
    if table.corrects:
        raise ValueError(
            "weight_source: a correction multiplies the unquantized weight. Set correction to '' everywhere."
        )
    if table.fprop.rhs.rht:
        raise ValueError(
            f"weight_source: Dgrad needs the weight's values, which a transform hides, got fprop.rhs.rht="
            f"{table.fprop.rhs.rht}. Set fprop.rhs.rht and fprop.lhs.rht to 0."
        )
    if table.fprop.rhs.adaptive != "none":
        raise ValueError(
            "weight_source: an adaptive layout follows the unquantized weight's statistics. Set "
            "fprop.rhs.adaptive to none."
        )
    if table.sums != "fp32":
        raise ValueError(f"weight_source: needs sums in FP32, got {table.sums}. Set sums to fp32.")
    if table.native:
        raise ValueError(
            "weight_source: GEMMs on FP4 tensor cores quantize the weight themselves. Convert with "
            "backend='emulated'."
        )
