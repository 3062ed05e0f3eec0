"""The weights that a recipe's forward pass multiplies by, as NVFP4 codes and scales for an export.

Checkpoints hold masters only. Fprop's operand W follows from a master, the recipe and, with an amax policy,
the recipe's state, so an export quantizes the masters again, and gets the bytes that the next training step
would use. A 16x16 block becomes sixteen 1x16 blocks with one scale. docs/nvfp4.md, sections 5 and 6.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fourbits.exchange.nvfp4_checkpoints import BLOCK, PackedWeight
from fourbits.exchange.outgoing import slabs
from fourbits.linear.layer_state import weight_in_use
from fourbits.linear.stacked.layer import converted_layers
from fourbits.model.lm import LanguageModel
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.quant.tensor import QuantizedTensor
from fourbits.recipe.recipe import GemmTable, table_from_text


@dataclass(frozen=True, slots=True)
class ForwardWeight:
    """Fprop's operand W of one layer. amax: fp32 scalar to quantize with; None takes the tensor's own."""

    table: GemmTable
    amax: Tensor | None = None

    @property
    def spec(self) -> OperandSpec:
        """The spec of W."""
        return self.table.fprop.rhs

    def with_amax(self, master: Tensor) -> "ForwardWeight":
        """The same with its amax known, measured on the master [N, K] if it is not."""
        return self if self.amax is not None else replace(self, amax=measured_amax(master, self.spec))

    def quantized(self, master: Tensor) -> Iterator[QuantizedTensor]:
        """The operand, a few rows at a time: whole blocks, and the bytes of the whole tensor's. [N, K]."""
        weight = self.with_amax(master)
        for rows in slabs(master, multiple=BLOCK):
            yield quantize(rows, weight.spec, amax=weight.amax)


def forward_weights(model: LanguageModel) -> dict[str, ForwardWeight]:
    """The quantized weights of a converted model, by parameter name; the model may be on the meta device."""
    found: dict[str, ForwardWeight] = {}
    for name, layer in converted_layers(model.named_modules()):
        text, amax = weight_in_use(layer.quantization)
        found[f"{name}.weight"] = ForwardWeight(table_from_text(text), amax)
    return {name: weight for name, weight in found.items() if weight.spec.block_format.quantized}


def measured_amax(master: Tensor, spec: OperandSpec) -> Tensor:
    """The amax that quantizing a whole weight [N, K] without a transform would use, fp32 scalar."""
    source = torch.bfloat16 if spec.source == "bf16" else master.dtype
    return torch.stack([rows.to(source).abs().amax().float() for rows in slabs(master)]).amax()


def packed_weight(weight: ForwardWeight, master: Tensor) -> PackedWeight:
    """Codes [N, K / 2] and scales [N, K / 16] of a weight for which `unsupported_nvfp4` is None."""
    codes: list[Tensor] = []
    scales: list[Tensor] = []
    global_scale = torch.ones((), dtype=torch.float32, device=master.device)
    for q in weight.quantized(master):
        rows_of_block = (weight.spec.block_size or (1, BLOCK))[0]
        # Repeated as bytes: not every operation supports the dtype.
        repeated = q.block_scale.view(torch.uint8).repeat_interleave(rows_of_block, 0)[: q.rows]
        codes.append(q.codes)
        scales.append(repeated)
        global_scale = q.global_scale
    block_scale = torch.cat(scales).view(torch.float8_e4m3fn)
    return PackedWeight(torch.cat(codes), block_scale, global_scale)


def unsupported_nvfp4(spec: OperandSpec, columns: int) -> str | None:
    """Why the formats cannot express a weight with this spec and in_features, or None."""
    if spec.format != "nvfp4":
        return f"its weight is {spec.format}"
    if spec.rht:
        return f"its weight is transformed (fprop.rhs.rht={spec.rht})"
    if spec.stochastic:
        return "its weight is rounded stochastically, so every step has other codes"
    rows, block = spec.block_size or (0, 0)
    if block != BLOCK or BLOCK % rows:
        return f"its blocks are {rows}x{block}, not 1x{BLOCK} or {BLOCK}x{BLOCK}"
    if columns % BLOCK:
        return f"its in_features, {columns}, are not a multiple of {BLOCK}"
    return None


def unsupported_inputs(weights: Mapping[str, ForwardWeight]) -> str | None:
    """Why servers cannot quantize the inputs of these layers as training did, or None."""
    for name, weight in weights.items():
        spec = weight.table.fprop.lhs
        layer = name.removesuffix(".weight")
        if weight.table.hot_channels:
            return f"the largest channels of the input of {layer} are multiplied unquantized in training"
        if spec.format != "nvfp4" or spec.block_size != (1, BLOCK):
            return f"the input of {layer} is {spec.format} {spec.block_size} in training"
        if spec.error_feedback:
            return f"the input of {layer} has error feedback in training"
        if spec.rht or spec.stochastic or spec.correction:
            return f"the input of {layer} is transformed, rounded stochastically or corrected in training"
    return None


def input_scale_of(weight: ForwardWeight, amax: Tensor) -> Tensor:
    """The global scale, an fp32 scalar, of a layer's input with this amax."""
    spec = replace(weight.table.fprop.lhs, amax_policy="current", correction="")
    return quantize(
        torch.zeros(1, BLOCK, dtype=torch.float32, device=amax.device), spec, amax=amax
    ).global_scale
