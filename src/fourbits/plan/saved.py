"""Memory that a training step saves, by part; tests/plan compares it with measured peaks.

The forward pass saves per token of a block, in BF16 elements of 2 bytes:

- a norm: its input (the residual stream), and its output as the input of a linear layer;
- attention: rotated q, k and v, its output (which is also o_proj's input), and FP32 statistics per head;
- an FFN: the outputs of up_proj (and gate_proj), and the activation as down_proj's input;
- a Mamba mixer: in_proj's output, convolved x, B and C, FP32 time steps, the scan's output, and the gated
  norm as out_proj's input.

A quantized layer saves its operand X of Wgrad in place of X, dequantized or as codes; an attention then keeps
its output beside o_proj's operand. Operands W of 16x16 blocks are kept for Dgrad.
"""

from dataclasses import dataclass

from fourbits.model.config import ModelConfig
from fourbits.plan.gpus import Gpu
from fourbits.plan.linears import LinearGroup, stored_bytes, unit_of
from fourbits.plan.software import Software


@dataclass(frozen=True, slots=True)
class SavedPerToken:
    """Bytes per token: inputs of linear layers, and everything else. unsharded_inputs: those of the inputs
    that column-parallel layers read (q, k, v, up, gate, in_proj): each of their ranks saves all tokens.
    """

    inputs: float
    rest: float
    unsharded_inputs: float

    @property
    def total(self) -> float:
        """Bytes per token of inputs and rest together."""
        return self.inputs + self.rest


def saved_per_token(
    model: ModelConfig, groups: list[LinearGroup], packs: bool, software: Software
) -> SavedPerToken:
    """What all blocks save per token. packs: quantized inputs are saved as codes and scales."""
    packs = packs or software.saves_operands
    inputs = rest = unsharded_inputs = 0.0
    for group in groups:
        if group.kind == "head and loss":
            inputs += 2.0 * group.inputs
            continue
        element = 2.0
        if group.quantized and packs and group.table.wgrad.rhs.block_format.quantized:
            element = stored_bytes(group.table.wgrad.rhs)
        own = element < 2.0 and not software.shares_inputs  # codes that each layer saves for itself
        added = group.count * group.inputs * element / (1 if own else group.readers)
        inputs += added
        unsharded_inputs += added if group.column_parallel else 0.0
        if group.quantized and group.name == "o_proj":  # its operand is a separate tensor
            rest += 2.0 * group.count * group.inputs
    rest += _rest(model) + (0.0 if software.fused else _unfused(model))
    return SavedPerToken(inputs, rest, unsharded_inputs)


def _rest(model: ModelConfig) -> float:
    letters = model.pattern.replace("T", "*-")
    attentions, ffns, mixers = (letters.count(letter) for letter in "*-M")
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    residual = 4.0 if model.residual_dtype == "fp32" else 2.0
    total = (model.num_residual_branches + 1) * (residual * model.d_model + 4.0)
    total += attentions * (2.0 * heads + 4.0 * model.num_heads)
    total += ffns * 2.0 * model.d_ffn * (2 if model.activation == "swiglu" else 1)
    total += mixers * (2.0 * (model.d_in_proj + model.d_conv + model.d_mamba) + 4.0 * model.mamba_num_heads)
    return total


def _unfused(model: ModelConfig) -> float:
    """What PyTorch's own operations save in addition: SiLU's output, and K and V repeated for all heads."""
    letters = model.pattern.replace("T", "*-")
    repeated = 2.0 * 2 * (model.num_heads - model.num_kv_heads) * model.head_dim
    silu = 2.0 * model.d_ffn if model.activation == "swiglu" else 0.0
    return letters.count("*") * repeated + letters.count("-") * silu


def kept_weights(groups: list[LinearGroup], gpu: Gpu, software: Software) -> float:
    """Bytes of quantized weights from the forward to the backward pass."""
    if not software.saves_weights:
        return 0.0
    return sum(
        group.weights
        * (2.0 if unit_of(group.table.fprop, gpu) == "bf16" else stored_bytes(group.table.fprop.rhs))
        for group in groups
        if group.kept
    )
