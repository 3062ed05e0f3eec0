"""A layer's weight, quantized shard by shard of its rows: the bytes of quantizing the whole weight.

An operand depends on more than its own blocks only through the tensor's amax. So shards of whole blocks that
are quantized with the amax of all of them, one after the other, are the codes and scales of the whole weight.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fourbits.linear.layer_state import LayerState, converted_state
from fourbits.linear.weight_source import check_table
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantizer, unsupported_packed_operand
from fourbits.quant.request import OperandInputs, OperandRequest, signature_of
from fourbits.quant.tensor import QuantizedTensor
from fourbits.recipe.recipe import GemmTable, table_from_text


class PackedShards:
    """One rank's shard of a layer's weight, and the whole weight after a gather. It is a weight source."""

    def __init__(self, layer: nn.Linear) -> None:
        """layer: one for which `unsupported_packed` returns None."""
        state = converted_state(layer)
        assert state is not None
        self.spec: OperandSpec = table_from_text(state.table).fprop.rhs
        self.shape = (layer.out_features, layer.in_features)
        self._own: QuantizedTensor | None = None
        self._gathered: tuple[Tensor, ...] | None = None

    def pack(self, shard: Tensor, amax: Tensor) -> None:
        """Quantize this rank's shard. amax: fp32 scalar, the largest of all shards."""
        given = amax if self.spec.tensor_scaled else None
        self._own = None  # frees its memory before the next one is allocated
        quantize = quantizer(signature_of(shard), (self._request(),))
        (own,) = quantize(shard, (OperandInputs(amax=given),), None)
        assert isinstance(own, QuantizedTensor)
        self._own = own

    def sent(self) -> tuple[Tensor, ...]:
        """This rank's codes and block scales, uint8. Raises RuntimeError before `pack`."""
        if self._own is None:
            raise RuntimeError(
                "PackedShards: the weight was gathered before it was quantized. Call pack first."
            )
        codes, scale = self._own.codes.contiguous(), self._own.block_scale.contiguous()
        return codes.view(torch.uint8), scale.view(torch.uint8)

    def receive(self, parts: tuple[Tensor, ...]) -> None:
        """The parts of all ranks, one after the other; they may be freed and filled again later."""
        self._gathered = parts

    def __call__(self, weight: Tensor) -> QuantizedTensor:
        """The whole weight. weight: a tensor of its shape, whose values are not read."""
        assert self._own is not None
        assert self._gathered is not None
        if weight.untyped_storage().size():
            weight.untyped_storage().resize_(0)  # of the first gather, which needs a tensor with memory
        codes, scale = self._gathered
        own = self._own
        return QuantizedTensor(
            codes=codes.view(own.codes.dtype),
            block_scale=scale.view(own.block_scale.dtype),
            global_scale=own.global_scale,
            axis=1,
            shape=self.shape,
            spec=self.spec,
        )

    def _request(self) -> OperandRequest:
        return OperandRequest(self.spec, 1, True, "given" if self.spec.tensor_scaled else "own")


def own_amaxes(weights: Sequence[PackedShards], shards: Sequence[Tensor]) -> Tensor:
    """The amaxes of shards as they will be quantized, fp32 [n]; as int32 bits they have the same order.

    Rounding to BF16 keeps the order of values, so it is applied last.
    """
    norms = torch._foreach_norm(list(shards), torch.inf)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    largest = torch.stack(norms)
    rounded = largest.to(torch.bfloat16).to(torch.float32)
    rounds = [weight.spec.source == "bf16" for weight in weights]
    found = [r if yes else x for r, x, yes in zip(rounded, largest, rounds, strict=True)]
    return (rounded if all(rounds) else torch.stack(found)).abs()  # a negative NaN would be the smallest


def unsupported_packed(layer: nn.Module, ranks: int) -> str | None:
    """Why the weight of a converted layer cannot be gathered as codes of `ranks` shards, or None."""
    state: Any = converted_state(layer)
    if state is None:
        return "its GEMMs are in BF16"
    if not isinstance(layer, nn.Linear):
        return "it holds several layers, or a transposed weight"
    return (
        _unsupported_state(state)
        or _unsupported_table(table_from_text(state.table))
        or _unsupported_rows(state, layer, ranks)
    )


def reads_as_bf16(layer: nn.Module) -> bool:
    """Whether a layer reads its weight only rounded to BF16.

    Assumes activations in BF16. Layers that are not converted declare it by `casts_weight`.
    """
    state = converted_state(layer)
    if state is None:
        return bool(getattr(layer, "casts_weight", False))
    if not isinstance(layer, nn.Linear) or not getattr(state.original, "casts_weight", False):
        return False
    phases = {} if state.phases is None else state.phases.phases
    tables = [state.base_table, table_from_text(state.table), *(table for _, table in phases.values())]
    return all(_as_bf16(table) for table in tables)


def _as_bf16(table: GemmTable) -> bool:
    def rounds(spec: OperandSpec) -> bool:
        return spec.source == "bf16" or spec.format == "bf16"

    again = table.dgrad.rhs
    return not table.corrects and rounds(table.fprop.rhs) and (rounds(again) or again.source == "forward")


def _unsupported_state(state: LayerState) -> str | None:
    if state.phases is not None:
        return "a phase of the recipe's schedule may need the unquantized weight"
    if state.recipe_state is not None:
        return "its amaxes depend on earlier steps or on other layers"
    if not state.quantize_eval:
        return "evaluation is not quantized"
    return None


def _unsupported_table(table: GemmTable) -> str | None:
    spec = table.fprop.rhs
    if spec.block_size is None or not spec.block_format.quantized:
        return "its W has no blocks"
    if spec.outer_size is not None or len(spec.scale_sizes) > 1:
        return "its W has several levels of scales"
    if spec.stochastic:
        return "its W is rounded stochastically"
    if reason := unsupported_packed_operand(spec):
        return reason
    if not (table.shares_weight or table.dgrad.rhs.source == "forward"):
        return "Dgrad quantizes W along the other axis"
    try:
        check_table(table)
    except ValueError as error:
        return str(error).removeprefix("weight_source: ").partition(". ")[0]
    return None


def _unsupported_rows(state: LayerState, layer: nn.Linear, ranks: int) -> str | None:
    size = table_from_text(state.table).fprop.rhs.block_size
    unit = 1 if size is None else size[0]
    if layer.out_features % ranks or layer.out_features // ranks % unit:
        return f"{layer.out_features} rows do not divide into {ranks} shards of whole blocks of {unit} rows"
    return None
