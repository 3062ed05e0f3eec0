"""MS-EDEN on a tensor that rotate_triton.py has transformed. docs/nvfp4.md, section 7.7.

A program quantizes one rotation (128 elements along the contraction) of several lanes. A thread holds the
same elements of every block of the rotation, because the sums over a rotation begin with whole blocks.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.rotate_triton import rotation_start
from fourbits.quant.kernels.rounding_triton import as_bf16, as_fp32, with_sign
from fourbits.quant.kernels.scaling_triton import block_amax
from fourbits.quant.kernels.tile_triton import rounded_tile, tensor_amax


@triton.jit
def blocks_apart(ptr, inside, STEP: tl.constexpr, COUNT: tl.constexpr, HARDWARE: tl.constexpr):
    """Load fp32 [A, B, COUNT]: the elements at ptr [A, B], and COUNT - 1 more, STEP apart."""
    if COUNT == 1:
        x = as_fp32(tl.load(ptr, mask=inside, other=0.0), HARDWARE)
    else:
        low = blocks_apart(ptr, inside, STEP * 2, COUNT // 2, HARDWARE)
        high = blocks_apart(ptr + STEP, inside, STEP * 2, COUNT // 2, HARDWARE)
        x = tl.reshape(tl.join(low, high), (ptr.shape[0], ptr.shape[1], COUNT))
    return x


@triton.jit(do_not_specialize=["stream"])
def rotation_kernel(
    x_ptr, length, lanes, out_ptr, amax_ptr, global_ptr, key_ptr, stream,
    CONFIG: tl.constexpr, FIELDS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """out, bf16 [lanes, length]: the exact operand of x, of the same shape and type, contraction along rows.

    length: a multiple of the rotation's size. LANES: lanes of a tile. Other arguments as in
    `operands_kernel`.
    """
    SIZE: tl.constexpr = CONFIG.transform.size
    start, lane = rotation_start(tl.num_programs(0) - 1 - tl.program_id(0), length, SIZE, LANES)
    across = tl.arange(0, LANES)[:, None]
    inside = (across < lanes - lane) & (start < length)
    offset = lane.to(tl.int64) * length + start
    first = x_ptr + offset + across * length + tl.arange(0, 16)[None, :]
    blocks = blocks_apart(first, inside, 16, SIZE // 16, HARDWARE)
    x = tl.reshape(tl.permute(tl.reshape(blocks, (LANES, 16, SIZE // 16)), (2, 1, 0)), (SIZE, LANES))
    tensor_bits = tensor_amax(amax_ptr, global_ptr, CONFIG, PARTS)
    amax_bits = block_amax(x, CONFIG, SIZE, LANES)
    rounded, scaled, scale = rounded_tile(x, amax_bits, tensor_bits, start, lane, key_ptr, stream, FIELDS,
                                          CONFIG, SIZE, LANES)  # fmt: skip
    values = as_bf16(tl.reshape(with_sign(rounded * scale, scaled), (SIZE, LANES)), HARDWARE)
    places = out_ptr + offset + across * length + tl.arange(0, SIZE)[None, :]
    tl.store(places, tl.trans(values), mask=inside)
