"""Quantization of large CPU tensors: the reference's functions, compiled in stages, or C++; equal bytes.

Each function has the name and arguments of its twin under reference/, which defines what it computes. This
file decides which stages are compiled together, and which sizes are constants of the compiled code.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fourbits.formats.packing import column_words, pack_nibbles, rows_of_words
from fourbits.quant.cpu import four_over_six
from fourbits.quant.cpu.compiled import compiled, with_static_sizes
from fourbits.quant.cpu.hadamard import transformed
from fourbits.quant.cpu.stages import (
    element_codes,
    exact_values,
    for_elements,
    for_scales,
    level_over_blocks,
    scales_of_blocks,
    scales_of_maxima,
    slice_maxima,
)
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference import quantize as reference
from fourbits.quant.reference.blocks import block_view, completed, grid_shape
from fourbits.quant.reference.elements import element_of
from fourbits.quant.reference.ms_eden import (
    cell_shape,
    corrected,
    corrections,
    group_view,
    over_group,
    products,
    without_underflow,
)
from fourbits.quant.reference.philox import as_elements, element_bits, scale_noise
from fourbits.quant.reference.quantize import (
    block_scales,
    epilogue_scale,
    one_on,
    packed,
    padding_zeroed,
    stored,
    unquantized,
)
from fourbits.quant.reference.scale_search import (
    IDEAL_SCALES,
    best_of,
    better_of,
    block_errors,
    element_slices,
    octaves,
    row_errors,
    six_and_four,
)
from fourbits.quant.reference.scales import Level, Scales, block_maxima, level_of, over_blocks, tensor_amax
from fourbits.quant.scale_hierarchy import encode_levels
from fourbits.quant.scale_rules import FOUR_OVER_SIX, SEARCH
from fourbits.quant.tensor import ExactOperand, QuantizedTensor

#: the scale rules and hierarchies that are compiled here
_RULES = ("max", "ceil", *FOUR_OVER_SIX, *SEARCH)
_HIERARCHIES = ("e4m3", "ue5m3", "e8m0", "fp32")


def quantize(
    x: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None, sr_key: Tensor | None
) -> QuantizedTensor:
    """Codes and scales of x as a GEMM operand."""
    y = source_of(x, spec, axis, sr_key)
    if not spec.block_format.quantized:
        return unquantized(y, x.shape, spec, axis)
    zeroed_padding = not spec.rht and y.shape != x.shape
    if not zeroed_padding and four_over_six.unsupported(y, spec, axis) is None:
        found = four_over_six.chosen_codes(y, spec, axis, amax)
        if found is not None:
            block_scale, size = (
                encode_levels((found.block_scale,), spec.block_format),
                (x.shape[0], x.shape[1]),
            )
            return QuantizedTensor(found.codes, block_scale, found.global_scale, axis, size, spec)
    codes, scales = _rounded(element_codes, y, spec, axis, amax, sr_key)
    codes = _packed_codes(padding_zeroed(codes, x.shape, spec, axis), spec, axis)
    return packed(codes, scales, x.shape, spec, axis)


def exact_operand(
    x: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None, sr_key: Tensor | None
) -> ExactOperand:
    """Values ready for a GEMM, equal to those of `quantize`'s codes and scales."""
    y = source_of(x, spec, axis, sr_key)
    if not spec.block_format.quantized:
        return ExactOperand(y.to(spec.block_format.dtype), one_on(y), axis, spec)
    if four_over_six.unsupported(y, spec, axis) is None:
        found = four_over_six.chosen_values(y, spec, axis, amax)
        if found is not None:
            return ExactOperand(*found, axis, spec)
    values, scales = _rounded(exact_values, y, spec, axis, amax, sr_key)
    return ExactOperand(values, epilogue_scale(scales, spec), axis, spec)


def source_of(x: Tensor, spec: OperandSpec, axis: int, sr_key: Tensor | None) -> Tensor:
    """y, the tensor that is quantized, by the compiled transform."""
    return reference.source_of(x, spec, axis, sr_key, transformed)


def _rounded(
    stage: Callable[..., Tensor],
    y: Tensor,
    spec: OperandSpec,
    axis: int,
    amax: Tensor | None,
    sr_key: Tensor | None,
) -> tuple[Tensor, Scales]:
    """`quantized_blocks` with its last step, `stage`: every element, in the shape of y, and the scales."""
    full = completed(y, spec, axis)
    scales = _scales(full, spec, axis, amax, sr_key)
    noise = _element_noise(sr_key, spec, y.shape, axis)
    rounded = compiled(stage)(
        _blocks(full, spec, axis),
        scales.encode,
        scales.block_scale,
        None if noise is None else _blocks(completed(noise, spec, axis), spec, axis),
        for_elements(spec),
    ).reshape(full.shape)
    return rounded if full is y else rounded[: y.shape[0], : y.shape[1]], scales


def _scales(full: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None, sr_key: Tensor | None) -> Scales:
    """Scales of every block of a completed tensor."""
    words = _scale_words(sr_key, spec, grid_shape(full, spec, axis), axis)
    if spec.scale_rule not in _RULES or spec.block_format.scale not in _HIERARCHIES:
        return _registered_scales(full, words, spec, axis, amax)
    if spec.error_metric is not None:
        return _searched_scales(full, words, spec, axis, amax)
    fields = compiled(scales_of_blocks)(_blocks(full, spec, axis), amax, words, for_scales(spec), axis)
    scales = Scales(*fields)
    if spec.rounding != "ms-eden":
        return scales
    assert words is not None
    return _corrected_scales(full, scales, words, spec, axis)


def _registered_scales(
    full: Tensor, words: Tensor | None, spec: OperandSpec, axis: int, amax: Tensor | None
) -> Scales:
    """Scales by functions that were registered from outside, which run uncompiled."""
    blocks = _blocks(full, spec, axis)
    block_amax = compiled(block_maxima)(blocks)
    level = level_of(tensor_amax(block_amax, amax, spec, axis), spec)
    local = over_blocks(level, block_amax, spec, axis)
    ideal = IDEAL_SCALES[spec.scale_rule](blocks, block_amax, local, spec, axis)
    return block_scales(block_amax, ideal, level, words, spec, axis)


def _searched_scales(
    full: Tensor, words: Tensor | None, spec: OperandSpec, axis: int, amax: Tensor | None
) -> Scales:
    """Scales by a rule that compares the errors of candidates."""
    spec, dim = for_scales(spec), 1 if axis == 1 else 2
    slices = _slices(full, spec, axis)
    block_amax = compiled(block_maxima)(slices) if axis == 0 else compiled(slice_maxima)(slices)
    level = Level(*compiled(level_over_blocks)(block_amax, amax, spec, axis))

    def error(scale: Tensor) -> Tensor:
        rows = compiled(row_errors)(slices, scale, level, spec, axis)
        if rows.shape[dim] == 1:
            return rows.squeeze(dim)
        return compiled(block_errors)(with_static_sizes(rows, dim), spec, dim)

    if spec.scale_rule in FOUR_OVER_SIX:
        (six, six_scale), (four, four_scale) = compiled(six_and_four)(block_amax, level, spec)
        ideal = compiled(better_of)(six, error(six_scale), four, error(four_scale))
    else:
        ideal = best_of(octaves(block_amax, level, spec), error)
    return Scales(*compiled(scales_of_maxima)(block_amax, amax, ideal, words, spec, axis))


def _corrected_scales(full: Tensor, scales: Scales, words: Tensor, spec: OperandSpec, axis: int) -> Scales:
    """Scales after the correction of MS-EDEN."""
    encode = compiled(without_underflow)(scales.encode, scales.block_scale)
    groups = with_static_sizes(group_view(full, spec, axis), 1, 2)
    cells = cell_shape(groups)
    sums = compiled(products)(groups, with_static_sizes(encode.reshape(cells), 1))
    v_v, v_q = (with_static_sizes(part, 1) for part in sums)
    factor = compiled(corrections)(v_v, v_q, with_static_sizes(scales.block_scale.reshape(cells), 1))
    factor = over_group(factor, cells, encode.shape)
    return scales._replace(block_scale=compiled(corrected)(scales.block_scale, factor, words), encode=encode)


def _blocks(full: Tensor, spec: OperandSpec, axis: int) -> Tensor:
    """The view of blocks, their size a constant of compiled code."""
    blocks = block_view(full, spec, axis)
    return blocks if spec.block_size is None else with_static_sizes(blocks, 1, 3)


def _slices(full: Tensor, spec: OperandSpec, axis: int) -> Tensor:
    """`element_slices`, the size of a block a constant of compiled code."""
    blocks = _blocks(full, spec, axis)
    return blocks if axis == 0 else with_static_sizes(compiled(element_slices)(blocks, axis), 1, 2)


def _element_noise(sr_key: Tensor | None, spec: OperandSpec, shape: torch.Size, axis: int) -> Tensor | None:
    """Random integers for the elements of a tensor of this shape; None where rounding draws none."""
    if spec.rounding not in ("sr", "sr32"):
        return None
    assert sr_key is not None, "stochastic rounding is called with a key"
    bits = compiled(element_bits)(sr_key, spec.rounding, shape[1 - axis], shape[axis] // 16, axis)
    return as_elements(bits, shape)


def _scale_words(sr_key: Tensor | None, spec: OperandSpec, grid: tuple[int, int], axis: int) -> Tensor | None:
    """Random bits for each block of a grid; None where block scales draw none."""
    if spec.scale_rounding != "sr" and spec.rounding != "ms-eden":
        return None
    assert sr_key is not None, "stochastic rounding is called with a key"
    assert spec.block_size is not None
    return compiled(scale_noise)(sr_key, spec.block_size, grid, axis)


def _packed_codes(codes: Tensor, spec: OperandSpec, axis: int) -> Tensor:
    """Codes as they are stored. codes: uint8, one per element, in layout."""
    if element_of(spec).bits == 8:
        return stored(codes, axis)
    if axis == 0:
        return rows_of_words(compiled(column_words)(codes))
    return compiled(pack_nibbles)(codes)
