"""Bytes that quantizers and elementwise work move, per token or per weight. Everything else is a rate.

They count reads and writes of whole tensors in BF16, forward and backward, by kernels that read each input
once.
"""

from fourbits.model.config import ModelConfig
from fourbits.plan.gpus import Gpu
from fourbits.plan.linears import LinearGroup, stored_bytes, unit_of
from fourbits.plan.software import Software
from fourbits.quant.operand import OperandSpec
from fourbits.recipe.recipe import GemmSpec


def quantizer_bytes(
    operands: list[tuple[OperandSpec, GemmSpec]], read: float, gpu: Gpu, software: Software
) -> float:
    """Bytes per element of a tensor from which these operands, each of a GEMM, are quantized."""
    found = [(spec, gemm) for spec, gemm in operands if spec.block_format.quantized]
    if not found:
        return 0.0
    amax = read if any(spec.tensor_scaled and spec.amax_policy == "current" for spec, _ in found) else 0.0
    reads = read if software.one_read else read * len(found)
    again = sum(1 for spec, _ in found if spec.rounding == "ms-eden")  # a transform before rounding
    written = sum(2.0 if unit_of(gemm, gpu) == "bf16" else stored_bytes(spec) for spec, gemm in found)
    return amax + reads + 4.0 * again + written


def tensors_of(group: LinearGroup) -> dict[str, list[tuple[OperandSpec, GemmSpec]]]:
    """The operands quantized from X, W and dY; W once where Dgrad reuses the operand of Fprop."""
    table = group.table
    fprop, dgrad, wgrad = table.fprop, table.dgrad, table.wgrad
    weight = [(fprop.rhs, fprop)]
    if not table.shares_weight:
        weight.append((dgrad.rhs, dgrad))
    return {
        "X": [(fprop.lhs, fprop), (wgrad.rhs, wgrad)],
        "W": weight,
        "dY": [(dgrad.lhs, dgrad), (wgrad.lhs, wgrad)],
    }


def elementwise_bytes(model: ModelConfig, fused: bool) -> dict[str, float]:
    """Bytes per token of everything between linear layers but attention and scan, by kind of work.

    Not fused: PyTorch's own operations, one after the other, with rotations in FP32.
    """
    d, letters = model.d_model, model.pattern.replace("T", "*-")
    attentions, ffns, mixers = (letters.count(letter) for letter in "*-M")
    branches = model.num_residual_branches
    heads = (model.num_heads + model.num_kv_heads) * model.head_dim
    rotated = 0.0 if model.rope_theta is None else (8.0 if fused else 40.0) * heads
    normed = 10.0 * heads if model.qk_norm else 0.0
    sums = 12.0 * d  # gradients of a tensor that three layers read
    groups = 0.0 if fused else 8.0 * (model.num_heads - model.num_kv_heads) * model.head_dim
    if model.activation == "swiglu":
        ffn = (16.0 if fused else 28.0) * model.d_ffn + 6.0 * d
    else:
        ffn = (10.0 if fused else 24.0) * model.d_ffn
    mamba = 10.0 * model.d_conv + 16.0 * model.d_mamba + 4.0 * model.d_in_proj
    return {
        "norms": 10.0 * d * (branches + 1),
        "residual sums": 12.0 * d * branches,
        "attention's rest": attentions * (rotated + normed + sums + groups),
        "activation": ffns * ffn,
        "convolution and gate": mixers * mamba,
    }


def loss_bytes(model: ModelConfig) -> float:
    """Bytes per token of the loss: the logits are read twice, and read again as their gradient is written."""
    return 10.0 * model.vocab_size


def attention_bytes(model: ModelConfig) -> float:
    """Bytes per token that attention cores read and write, forward and backward."""
    letters = model.pattern.replace("T", "*-")
    return letters.count("*") * 2.0 * model.head_dim * (6 * model.num_heads + 6 * model.num_kv_heads)
