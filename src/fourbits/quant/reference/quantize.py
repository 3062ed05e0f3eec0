"""The specification of quantization, in plain torch: readable aloud, bit-exact, on any device.

Other implementations must give equal bytes. Everything keeps the layout of the tensor, so that no step
transposes: `axis` says along which axis blocks run. docs/nvfp4.md, sections 6 and 7, has the rules.

Arguments are those of `fourbits.quant.quantize` in their normal form: x 2-D fp32, bf16 or fp16; axis 0 or 1;
amax None or an fp32 scalar >= 0; sr_key None or int64 [5]; coefficients None or int8 [K, span].
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.formats.packing import pack_nibbles
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.blocks import block_view, completed, grid_shape, padded, unblocked
from fourbits.quant.reference.elements import codes_of, element_of, exact_values_of, rounded_magnitudes
from fourbits.quant.reference.error_feedback import blocks_with_feedback
from fourbits.quant.reference.hadamard import transformed
from fourbits.quant.reference.ms_eden import corrected_scales
from fourbits.quant.reference.philox import element_noise, scale_words
from fourbits.quant.reference.scale_search import IDEAL_SCALES
from fourbits.quant.reference.scales import (
    Level,
    Scales,
    block_maxima,
    level_of,
    over_blocks,
    poisoned,
    tensor_amax,
)
from fourbits.quant.scale_hierarchy import SCALE_HIERARCHIES, encode_levels
from fourbits.quant.tensor import ExactOperand, QuantizedTensor


class QuantizedBlocks(NamedTuple):
    """A tensor on its way to codes or values, as blocks [A, a, B, b]."""

    #: fp32: what was quantized
    values: Tensor
    #: fp32: magnitudes on the element grid
    magnitudes: Tensor
    scales: Scales


def quantize(
    x: Tensor,
    spec: OperandSpec,
    axis: int,
    amax: Tensor | None,
    sr_key: Tensor | None,
    coefficients: Tensor | None = None,
) -> QuantizedTensor:
    """Codes and scales of x as a GEMM operand."""
    y = source_of(x, spec, axis, sr_key)
    if not spec.block_format.quantized:
        return unquantized(y, x.shape, spec, axis)
    values, magnitudes, scales = quantized_blocks(y, spec, axis, amax, sr_key, coefficients)
    codes = unblocked(codes_of(magnitudes, values, scales.block_scale, spec), y.shape)
    codes = stored(padding_zeroed(codes, x.shape, spec, axis), axis)
    return packed(pack_nibbles(codes) if element_of(spec).bits == 4 else codes, scales, x.shape, spec, axis)


def exact_operand(
    x: Tensor,
    spec: OperandSpec,
    axis: int,
    amax: Tensor | None,
    sr_key: Tensor | None,
    coefficients: Tensor | None = None,
) -> ExactOperand:
    """Values ready for a GEMM, equal to those of `quantize`'s codes and scales."""
    y = source_of(x, spec, axis, sr_key)
    if not spec.block_format.quantized:
        return ExactOperand(y.to(spec.block_format.dtype), one_on(y), axis, spec)
    values, magnitudes, scales = quantized_blocks(y, spec, axis, amax, sr_key, coefficients)
    exact = unblocked(exact_values_of(magnitudes, values, scales.block_scale, spec), y.shape)
    return ExactOperand(exact, epilogue_scale(scales, spec), axis, spec)


def source_of(
    x: Tensor,
    spec: OperandSpec,
    axis: int,
    sr_key: Tensor | None,
    transform: Callable[..., Tensor] = transformed,
) -> Tensor:
    """y, the tensor that is quantized, in the layout of x: its source, padded along axis, transformed.

    transform: an implementation of `transformed`.
    """
    y = padded_source(x, spec, axis)
    return transform(y, spec, axis, sr_key) if spec.rht else y


def padded_source(x: Tensor, spec: OperandSpec, axis: int) -> Tensor:
    """x, or its bf16 rounding where spec says so, with zeros appended along axis up to Cp."""
    return padded(x.to(torch.bfloat16) if spec.source == "bf16" else x, spec, axis)


def quantized_blocks(
    y: Tensor,
    spec: OperandSpec,
    axis: int,
    amax: Tensor | None,
    sr_key: Tensor | None,
    coefficients: Tensor | None = None,
) -> QuantizedBlocks:
    """From the source to scales and rounded elements: the algorithm.

    y: as from `source_of`; the other arguments as for `quantize`. With coefficients a column of blocks of all
    spans is quantized at a time, under the amax of the whole.
    """
    if coefficients is not None:
        plain = replace(spec, error_feedback=0)
        whole = y.to(torch.float32).abs().amax() if amax is None and y.numel() else amax
        return QuantizedBlocks(
            *blocks_with_feedback(
                y, coefficients, spec, lambda part: quantized_blocks(part, plain, axis, whole, None)
            )
        )
    full = completed(y, spec, axis)
    blocks = block_view(full, spec, axis)
    block_amax = block_maxima(blocks)

    level = level_of(tensor_amax(block_amax, amax, spec, axis), spec)
    local = over_blocks(level, block_amax, spec, axis)
    ideal = IDEAL_SCALES[spec.scale_rule](blocks, block_amax, local, spec, axis)
    words = scale_words(sr_key, spec, grid_shape(full, spec, axis), axis) if spec.stochastic else None
    scales = block_scales(block_amax, ideal, level, words, spec, axis)
    if spec.rounding == "ms-eden":
        assert words is not None
        scales = corrected_scales(full, scales, words, spec, axis)

    noise = element_noise(sr_key, spec, y.shape, axis) if spec.stochastic else None
    if noise is not None:
        noise = block_view(completed(noise, spec, axis), spec, axis)
    values = blocks.to(torch.float32)
    magnitudes = rounded_magnitudes(values, scales.encode, scales.block_scale, noise, spec)
    return QuantizedBlocks(values, magnitudes, scales)


def block_scales(
    block_amax: Tensor, ideal: Tensor, level: Level, words: Tensor | None, spec: OperandSpec, axis: int
) -> Scales:
    """Scales of every block under a tensor's level, derived from the ideal scales by the format's hierarchy.

    ideal: by the scale rule, before rounding; words: 32 random bits per block, where block scales round
    stochastically.
    """
    fmt, local = spec.block_format, over_blocks(level, block_amax, spec, axis)
    hierarchy = SCALE_HIERARCHIES[fmt.scale or ""]
    levels, encode = hierarchy.derive(block_amax, ideal, local, words, spec, axis)
    finest = poisoned(levels[0], block_amax, local)
    if len(levels) == 1:
        return Scales(finest, level.decode, encode)
    levels = (finest, *levels[1:])
    return Scales(hierarchy.effective(levels, fmt, axis), level.decode, encode, levels)


def padding_zeroed(codes: Tensor, shape: torch.Size, spec: OperandSpec, axis: int) -> Tensor:
    """Codes with 0 for padding, in poisoned blocks too; transformed padding is an element like any other.

    shape: that of the tensor before padding.
    """
    return codes if spec.rht else padded(codes[: shape[0], : shape[1]], spec, axis)


def packed(codes: Tensor, scales: Scales, shape: torch.Size, spec: OperandSpec, axis: int) -> QuantizedTensor:
    """The operand of codes as they are stored, and scales in the layout of the tensor."""
    size = (shape[0], shape[1])
    if spec.block_size is None:
        return QuantizedTensor(codes, no_blocks_on(codes), scales.block_scale.reshape(()), axis, size, spec)
    levels = scales.levels or (scales.block_scale,)
    block_scale = encode_levels(tuple(stored(level, axis) for level in levels), spec.block_format)
    return QuantizedTensor(codes, block_scale, stored(scales.global_scale, axis), axis, size, spec)


def unquantized(y: Tensor, shape: torch.Size, spec: OperandSpec, axis: int) -> QuantizedTensor:
    """The operand of a format without scales, bf16 or fp32: the values themselves."""
    values = stored(y.to(spec.block_format.dtype), axis)
    return QuantizedTensor(values, no_blocks_on(y), one_on(y), axis, (shape[0], shape[1]), spec)


def epilogue_scale(scales: Scales, spec: OperandSpec) -> Tensor:
    """The FP32 scale that an exact operand's values still need: one for the tensor, or a grid."""
    scale = scales.block_scale if spec.block_format.scale_in_epilogue else scales.global_scale
    return scale.reshape(()) if spec.block_size is None else scale


def stored(x: Tensor, axis: int) -> Tensor:
    """Rows first, the contraction axis last, contiguous."""
    return (x.t() if axis == 0 else x).contiguous()


def no_blocks_on(x: Tensor) -> Tensor:
    """The block scales of an operand without blocks, on the device of x."""
    return torch.empty((0, 0), dtype=torch.float32, device=x.device)


def one_on(x: Tensor) -> Tensor:
    """The global scale of an operand without one, on the device of x."""
    return torch.ones((), dtype=torch.float32, device=x.device)
