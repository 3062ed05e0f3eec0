"""The steps of every quantizing kernel on a tile: read it, prepare it, scale it, round it.

A tile is a strip of rows by a range of columns, held in registers as fp32 [ROWS, COLUMNS].
docs/nvfp4.md, sections 6 to 11.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.hadamard_triton import transformed
from fourbits.quant.kernels.ms_eden_triton import corrected_scale
from fourbits.quant.kernels.philox_triton import tile_noise
from fourbits.quant.kernels.rounding_triton import (
    ABS_BITS,
    as_fp32,
    bits_of,
    nearest,
    stochastic,
    stochastic_24,
    to_bf16,
)
from fourbits.quant.kernels.scale_search_triton import chosen_scale
from fourbits.quant.kernels.scaling_triton import blocked, encode_scale, max_target, power_of_two, two_level


@triton.jit
def load_tile(x_ptr, stride, row, column, M, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              HARDWARE: tl.constexpr):  # fmt: skip
    """fp32 [ROWS, COLUMNS] of x from (row, column) on; zero outside of [M, K]."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = (rows < M - row) & (columns < K - column)
    start = x_ptr + row.to(tl.int64) * stride + column
    return as_fp32(tl.load(start + rows * stride + columns, mask=inside, other=0.0), HARDWARE)


@triton.jit
def load_factor(factor_ptr, SCALED: tl.constexpr):
    """The factor on a tensor's values, fp32 scalar; 1 without one."""
    if SCALED:
        factor = tl.load(factor_ptr)
    else:
        factor = tl.full((), 1.0, tl.float32)
    return factor


@triton.jit
def times(x, factor, SCALED: tl.constexpr):
    """x * factor, fp32, where there is a factor."""
    if SCALED:
        x = x * factor
    return x


@triton.jit
def tile_start(K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """First (row, column) of this program's tile of a tensor [M, K].

    Programs take tiles from the tensor's end, because the amax pass read it last and it is still cached.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    across = tl.maximum(tl.cdiv(K, COLUMNS), 1)
    return (tile // across) * ROWS, (tile % across) * COLUMNS


@triton.jit
def amax_of_parts(amax_ptr, PARTS: tl.constexpr):
    """Bit pattern of the largest of PARTS partial maxima, int32 scalar; that of a NaN if one is NaN."""
    return tl.max(bits_of(tl.load(amax_ptr + tl.arange(0, PARTS))) & ABS_BITS, axis=0)


@triton.jit
def global_scale(tensor_bits, CONFIG: tl.constexpr):
    """The global scale that follows from the tensor's amax, fp32 scalar; 1 without one."""
    scale = tl.full((), 1.0, tl.float32)
    if CONFIG.target != 0.0:
        scale = tl.div_rn(scale, encode_scale(tensor_bits, CONFIG.target))
    return scale


@triton.jit
def tensor_amax(amax_ptr, global_ptr, CONFIG: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr = False):
    """Bit pattern of the tensor's amax, int32 scalar, from PARTS partial maxima; 0 without a global scale.

    The first program writes the global scale that follows from it; with ALL, every program does.
    """
    bits = tl.full((), 0, tl.int32)
    if CONFIG.target != 0.0:
        bits = amax_of_parts(amax_ptr, PARTS)
    scale = global_scale(bits, CONFIG)  # every program needs these divisions anyway
    if ALL or tl.program_id(0) == 0:
        tl.store(global_ptr, scale)
    return bits


@triton.jit
def prepared_tile(x, IS_BF16: tl.constexpr, key_ptr, stream, FIELDS: tl.constexpr, CONFIG: tl.constexpr,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr,
                  WIDE: tl.constexpr = False):  # fmt: skip
    """The tile to quantize: x rounded to bf16 or transformed, by the config. WIDE: as in `to_bf16`."""
    if (CONFIG.through_bf16 or CONFIG.transform is not None) and not IS_BF16:
        x = to_bf16(x, HARDWARE, WIDE)
    if CONFIG.transform is not None:
        TRANSFORM: tl.constexpr = CONFIG.transform
        y = transformed(x, key_ptr, stream, FIELDS, TRANSFORM, ROWS, COLUMNS, HARDWARE, WIDE)
    else:
        y = x
    return y


@triton.jit
def rounded_tile(y, amax_bits, tensor_bits, row, column, key_ptr, stream, FIELDS: tl.constexpr,
                 CONFIG: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """(magnitudes on the grid, values before rounding, block scales), fp32 in blocks; scales [R, 1, C, 1].

    amax_bits: of y's blocks; tensor_bits: of the tensor. The values before rounding have the signs. A
    poisoned block has a NaN scale and arbitrary magnitudes.
    """
    ELEMENT: tl.constexpr = CONFIG.element
    blocks = blocked(y, CONFIG, ROWS, COLUMNS)
    if CONFIG.scale is None:
        scale, encode = power_of_two(amax_bits, CONFIG)
    else:
        if CONFIG.metric == "":
            ideal = max_target(amax_bits, tensor_bits, CONFIG)
        else:
            ideal = chosen_scale(blocks, amax_bits, tensor_bits, CONFIG)
        scale, encode = two_level(ideal, amax_bits, tensor_bits, CONFIG)
    if CONFIG.rounding == "ms-eden":
        encode = tl.where(scale == 0.0, 0.0, encode)
    scaled = blocks * encode
    if CONFIG.rounding == "rne":
        rounded = nearest(scaled, ELEMENT)
    elif CONFIG.rounding == "ms-eden":
        rounded = nearest(scaled, ELEMENT)
        scale = corrected_scale(
            scaled, rounded, scale, row, column, key_ptr, stream, FIELDS, CONFIG, ROWS, COLUMNS
        )
    else:
        WORDS: tl.constexpr = CONFIG.rounding == "sr32"
        noise = tile_noise(key_ptr, stream, FIELDS, row, column, CONFIG.axis, WORDS, ROWS, COLUMNS)
        noise = blocked(noise, CONFIG, ROWS, COLUMNS)
        if WORDS:
            rounded = stochastic_24(scaled, noise, ELEMENT)
        else:
            rounded = stochastic(scaled, noise, ELEMENT)
    return rounded, scaled, scale
