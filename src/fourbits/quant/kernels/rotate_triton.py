"""The Hadamard transform of MS-EDEN in a separate pass, which writes the transformed tensor and its amax.

A butterfly over 128 elements fits in one thread's registers if they hold nothing else. The transformed tensor
has the contraction along its rows, whichever axis it was; rotation_triton.py quantizes it.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.hadamard_triton import rotated
from fourbits.quant.kernels.packing_triton import load_held
from fourbits.quant.kernels.rounding_triton import ABS_BITS, as_bf16, as_fp32, bits_of, float_of, to_bf16
from fourbits.quant.kernels.scaling_triton import halved_rows, larger
from fourbits.quant.kernels.tile_triton import load_factor, load_tile, times


@triton.jit
def rotation_start(tile, LENGTH, SIZE: tl.constexpr, LANES: tl.constexpr):
    """First element along the contraction and first lane of a tile: one rotation of several lanes."""
    along = tl.maximum(LENGTH // SIZE, 1)
    return (tile % along) * SIZE, (tile // along) * LANES


@triton.jit(do_not_specialize=["stream"])
def rotate_kernel(
    x_ptr, x_stride, M, K, factor_ptr, out_ptr, length, lanes, amax_ptr, key_ptr, stream,
    CONFIG: tl.constexpr, AXIS: tl.constexpr, FIELDS: tl.constexpr, SCALED: tl.constexpr,
    LANES: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """out, bf16 [lanes, length]: x [M, K] transformed along AXIS, which is padded to whole rotations.

    amax: a partial maximum for each program. SCALED: x is multiplied by the factor. LANES: lanes of a tile.
    """
    SIZE: tl.constexpr = CONFIG.transform.size
    TRANSFORM: tl.constexpr = CONFIG.transform
    IS_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16 and not SCALED
    factor = load_factor(factor_ptr, SCALED)
    largest = tl.zeros((1, LANES), tl.float32)
    along = tl.arange(0, SIZE)[None, :]
    across = tl.arange(0, LANES)[:, None]
    tiles = (length // SIZE) * tl.cdiv(lanes, LANES)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        start, lane = rotation_start(tile, length, SIZE, LANES)
        if AXIS == 0:
            x = load_tile(x_ptr, x_stride, start, lane, M, K, SIZE, LANES, HARDWARE)
        else:
            x = tl.trans(load_held(x_ptr, x_stride, lane, start, M, K, 1, SIZE, LANES, SIZE, HARDWARE))
        x = times(x, factor, SCALED)
        if not IS_BF16:
            x = to_bf16(x, HARDWARE, True)
        z = rotated(x, key_ptr, stream, FIELDS, TRANSFORM, SIZE, LANES)
        y = as_bf16(z * TRANSFORM.scale, HARDWARE)
        maxima = halved_rows(as_fp32(y, HARDWARE), SIZE.bit_length() - 1, SIZE, LANES)
        largest = larger(largest, maxima)
        first = out_ptr + lane.to(tl.int64) * length + start
        tl.store(first + across * length + along, tl.trans(y), mask=across < lanes - lane)
    tl.store(
        amax_ptr + tl.program_id(0), float_of(tl.max(tl.max(bits_of(largest) & ABS_BITS, axis=1), axis=0))
    )
