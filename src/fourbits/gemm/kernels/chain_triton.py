"""The GEMM with an FP4 tensor core's sums, where the operands' extents prove that a short path is exact.

There, one dot of an instruction's products, from zero, is exact in FP32, and one addition toward zero is the
instruction's only rounding. Tiles without that proof are left to `chain_terms_kernel`. docs/nvfp4.md, 22.4.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.gemm.kernels.chain_operand_triton import SLACK
from fourbits.gemm.kernels.tile_triton import added_product, bias_of, finished, tile_position
from fourbits.quant.kernels.rounding_triton import bits_of, float_of, rounded_to

#: states of a tile after `chain_kernel`: every term is needed; no term is truncated; it is done
EVERY_TERM = tl.constexpr(0)
EXACT = tl.constexpr(1)
DONE = tl.constexpr(2)
#: sums below 2^24 last bits are exact in FP32, even in tensor cores that align to 24 bits below the largest
FP32_SUMS = tl.constexpr(float(1 << 24))
#: terms are not truncated if none is 2^35 times the last bit of another
_UNTRUNCATED = tl.constexpr(float(1 << 35))
#: number of instructions whose ratios are read together
_AT_A_TIME = tl.constexpr(64)


@triton.jit
def add_toward_zero(a, b, HARDWARE: tl.constexpr):
    """a + b in FP32, rounded toward zero; for finite numbers far from overflow and from subnormals."""
    if HARDWARE:
        result = tl.inline_asm_elementwise(
            "add.rz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        nearest = a + b
        moved = nearest - a
        error = (a - (nearest - moved)) + (b - moved)
        beyond = (error != 0) & ((error < 0) == (nearest > 0))
        result = tl.where(beyond, float_of(bits_of(nearest) - 1), nearest)
    return result


@triton.jit
def spread_of_rows(extent_ptr, first, R, parts, ROWS: tl.constexpr):
    """The largest quotient of a row's term or sum and its last bit, over ROWS rows from `first` on."""
    rows = first + tl.arange(0, ROWS)
    inside = rows < R
    squares = tl.zeros((ROWS,), tl.float32)
    last = tl.full((ROWS,), float("inf"), tl.float32)
    top = tl.zeros((ROWS,), tl.float32)
    for part in range(parts):
        found = extent_ptr + part * R + rows
        squares += tl.load(found, mask=inside, other=0.0)
        last = tl.minimum(last, tl.load(found + parts * R, mask=inside, other=float("inf")))
        top = tl.maximum(top, tl.load(found + 2 * parts * R, mask=inside, other=0.0))
    return tl.max(tl.maximum(tl.sqrt(squares) * SLACK, top) / last, 0)


@triton.jit
def ratios(ratio_ptr, first, R, step, steps, HEIGHT: tl.constexpr, ROWS: tl.constexpr):
    """The largest ratio over ROWS rows from `first` on, by instruction; an entry covers HEIGHT rows."""
    largest = tl.zeros(step.shape, tl.float32)
    for at in tl.static_range(ROWS // HEIGHT):
        entry = first // HEIGHT + at
        inside = (step < steps) & (entry * HEIGHT < R)
        largest = tl.maximum(largest, tl.load(ratio_ptr + entry * steps + step, mask=inside, other=0.0))
    return largest


# Sizes that only bound loops and masks of rows: specialized on, each layer would compile the kernel again.
@triton.jit(do_not_specialize=["M", "steps", "parts"])
def chain_kernel(
    a, b, out_ptr, out_stride, done_ptr, ratio_a_ptr, extent_a_ptr, ratio_b_ptr, extent_b_ptr,
    scale_a_ptr, scale_b_ptr, bias_ptr, M, N, steps, parts,
    HAS_BIAS: tl.constexpr, HEIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PIECES: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """out [M, N] = (sum over K) * scale_a * scale_b + bias, in the tiles where the short path is exact.

    a, b: tensor descriptors of values [M, K] and [N, K]; an instruction has PIECES * BK products. done:
    receives the state of each tile.
    """
    i, j = tile_position(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN))
    spread = spread_of_rows(extent_a_ptr, i * BM, M, parts, BM) * spread_of_rows(
        extent_b_ptr, j * BN, N, parts, BN
    )
    exact = spread < _UNTRUNCATED  # also false for NaN, 0 times infinity
    wide = tl.zeros((_AT_A_TIME,), tl.int32)
    for first in range(0, steps, _AT_A_TIME):
        step = first + tl.arange(0, _AT_A_TIME)
        ratio = ratios(ratio_a_ptr, i * BM, M, step, steps, HEIGHT, BM) * ratios(
            ratio_b_ptr, j * BN, N, step, steps, HEIGHT, BN
        )
        wide += (ratio >= FP32_SUMS).to(tl.int32)
    short = exact & (tl.sum(wide, 0) == 0)
    tl.store(done_ptr + i * tl.cdiv(N, BN) + j, tl.where(short, DONE, tl.where(exact, EXACT, EVERY_TERM)))
    if short:
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(steps):
            partial = tl.zeros((BM, BN), tl.float32)
            for piece in tl.static_range(PIECES):
                k = (step * PIECES + piece) * BK
                left = a.load([i * BM, k])  # TMA loads zeros beyond the tensors
                right = b.load([j * BN, k]).T
                partial = added_product(partial, left, right, HARDWARE)
            acc = add_toward_zero(acc, partial, HARDWARE)
        store_finished(
            out_ptr,
            out_stride,
            acc,
            i * BM,
            j * BN,
            scale_a_ptr,
            scale_b_ptr,
            bias_ptr,
            M,
            N,
            HAS_BIAS,
            HARDWARE,
        )


@triton.jit
def store_finished(out_ptr, out_stride, acc, row, column, scale_a_ptr, scale_b_ptr, bias_ptr, M, N,
                   HAS_BIAS: tl.constexpr, HARDWARE: tl.constexpr):  # fmt: skip
    """Scale the sums of a tile, add the bias, round and write."""
    rows = row + tl.arange(0, acc.shape[0])
    columns = column + tl.arange(0, acc.shape[1])
    bias = bias_of(bias_ptr, columns, N, HAS_BIAS)
    acc = finished(acc, tl.load(scale_a_ptr), tl.load(scale_b_ptr), bias, HAS_BIAS)
    target = out_ptr + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(target, rounded_to(acc, out_ptr.dtype.element_ty, HARDWARE), mask=inside)
