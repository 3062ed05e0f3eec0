"""Weights that arrive quantized, such as from an all-gather of codes and scales instead of values.

The layer multiplies what its source returns and never quantizes its own weight. docs/nvfp4.md, section 8, has
the values that Dgrad re-quantizes where its operand is not the transpose of Fprop's.
"""

from torch import Tensor, nn

from fourbits.linear.layer_state import WeightSource, state_of
from fourbits.quant.tensor import QuantizedTensor
from fourbits.recipe.recipe import GemmTable, table_from_text


def set_weight_source(layer: nn.Module, source: WeightSource | None) -> None:
    """Give a converted layer its weight as codes and scales; None quantizes the layer's weight again.

    source: called with the layer's weight (an expert's, in groups) before each forward; returns the whole
    weight [N, K], quantized along axis 1 with `weight_spec(layer)`. The weight itself is not read: only its
    shape and dtype count, and it gets the gradient. Raises ValueError for a layer that is not converted.
    """
    state = state_of(layer, "set_weight_source")
    if source is not None:
        _check_table(table_from_text(state.table))
    state.weight_source = source


def received_weight(source: WeightSource, weight: Tensor, table: str) -> QuantizedTensor:
    """What a source returns for a weight. Raises ValueError if it does not fit the layer's table."""
    received, parsed = source(weight), table_from_text(table)
    _check_table(parsed)
    if not isinstance(received, QuantizedTensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"weight_source: must return a QuantizedTensor, got {type(received).__name__}. Return what "
            "fourbits.quantize returns."
        )
    expected = (tuple(weight.shape), 1, parsed.fprop.rhs)
    got = (received.shape, received.axis, received.spec)
    if got != expected:
        names = ("shape", "axis", "spec")
        name, value, wrong = next(z for z in zip(names, expected, got, strict=True) if z[1] != z[2])
        raise ValueError(
            f"weight_source: {name} must be {value}, as the layer's Fprop takes it, got {wrong}. Quantize "
            "the weight along axis 1 with the recipe's fprop.rhs."
        )
    return received


def _check_table(table: GemmTable) -> None:
    """Raises ValueError for a table that needs the unquantized weight."""
    if table.corrects:
        raise ValueError(
            "weight_source: a correction multiplies the unquantized weight. Set correction to '' everywhere."
        )
    if table.native:
        raise ValueError(
            "weight_source: GEMMs on FP4 tensor cores quantize the weight themselves. Convert with "
            "backend='emulated'."
        )
