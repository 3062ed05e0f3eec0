"""Philox4x32 inside kernels: one call per 16-element block, keyed by global coordinates. docs/nvfp4.md, 11.

The key is read from device memory, so a captured graph replays with new noise and no value travels to the
host. Every function below takes it as (key_ptr, stream, FIELDS), see `OperandRequest.key_fields`.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.reference.philox import ROUNDS, SIGN_ROLE, SIGN_WORD

_ROUNDS = tl.constexpr(ROUNDS)
_SIGN_ROLE = tl.constexpr(SIGN_ROLE)
_SIGN_WORD = tl.constexpr(SIGN_WORD)
_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_KEY_STEP_0 = tl.constexpr(0x9E3779B9)
_KEY_STEP_1 = tl.constexpr(0xBB67AE85)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four words per counter; all uint32, tensors of one shape or scalars."""
    for _ in tl.static_range(_ROUNDS):
        product0 = c0.to(tl.uint64) * _MULTIPLIER_0  # one wide multiplication gives both halves
        product1 = c2.to(tl.uint64) * _MULTIPLIER_1
        c0, c2 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0, (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = product1.to(tl.uint32), product0.to(tl.uint32)
        k0 += _KEY_STEP_0
        k1 += _KEY_STEP_1
    return c0, c1, c2, c3


@triton.jit
def key_entry(key_ptr, FIELDS: tl.constexpr, i: tl.constexpr):
    """Low 32 bits of entry i of (seed, stream, step, first row, first block), uint32."""
    return tl.load(key_ptr + FIELDS[i]).to(tl.uint32)


@triton.jit
def block_words(key_ptr, stream, FIELDS: tl.constexpr, row, block, WORD: tl.constexpr):
    """The four words of blocks. row, block: int32 tensors that broadcast, coordinates within the operand."""
    seed = key_entry(key_ptr, FIELDS, 0)
    layer_role = key_entry(key_ptr, FIELDS, 1) + stream.to(tl.uint32)
    zero = tl.zeros_like((row + block).to(tl.uint32))
    c0 = zero + key_entry(key_ptr, FIELDS, 2)
    c1 = zero + key_entry(key_ptr, FIELDS, 4) + block.to(tl.uint32)
    c2 = zero + key_entry(key_ptr, FIELDS, 3) + row.to(tl.uint32)
    return philox(c0, c1, c2, zero + WORD, seed, layer_role)


@triton.jit
def one_of_four(w0, w1, w2, w3, i):
    """Word i of four; all broadcast, i: int32 in [0, 4)."""
    return tl.where(i < 2, tl.where(i < 1, w0, w1), tl.where(i < 3, w2, w3))


@triton.jit
def noise_in(key_ptr, stream, FIELDS: tl.constexpr, row, block, t, WORDS: tl.constexpr):
    """Random bits of element t of each block: a byte, or with WORDS a whole word; uint32.

    row, block, t: int32, shaped so that they broadcast to the elements.
    """
    w0, w1, w2, w3 = block_words(key_ptr, stream, FIELDS, row, block, 0)
    if WORDS:
        noise = one_of_four(w0, w1, w2, w3, t % 4)
        for word in tl.static_range(1, 4):
            w0, w1, w2, w3 = block_words(key_ptr, stream, FIELDS, row, block, word)
            noise = tl.where(t // 4 == word, one_of_four(w0, w1, w2, w3, t % 4), noise)
    else:
        noise = (one_of_four(w0, w1, w2, w3, t // 4) >> (8 * (t % 4)).to(tl.uint32)) & 255
    return noise


@triton.jit
def tile_noise(key_ptr, stream, FIELDS: tl.constexpr, row, column, AXIS: tl.constexpr, WORDS: tl.constexpr,
               ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Random bits of a tile whose first element is (row, column), uint32 [ROWS, COLUMNS].

    The coordinate along the contraction (the columns for AXIS 1, the rows for AXIS 0) is a multiple of 16.
    """
    t = tl.arange(0, 16)
    if AXIS == 1:
        across = (row + tl.arange(0, ROWS))[:, None, None]
        blocks = (column // 16 + tl.arange(0, COLUMNS // 16))[None, :, None]
        noise = noise_in(key_ptr, stream, FIELDS, across, blocks, t[None, None, :], WORDS)
    else:
        across = (column + tl.arange(0, COLUMNS))[None, None, :]
        blocks = (row // 16 + tl.arange(0, ROWS // 16))[:, None, None]
        noise = noise_in(key_ptr, stream, FIELDS, across, blocks, t[None, :, None], WORDS)
    return tl.reshape(noise, (ROWS, COLUMNS))


@triton.jit
def sign_words(key_ptr, stream, FIELDS: tl.constexpr, PER_CALL: tl.constexpr):
    """Four words of sign bits that a layer, and with PER_CALL a step, draws for both operands of a GEMM."""
    layer_role = key_entry(key_ptr, FIELDS, 1) + stream.to(tl.uint32)
    gemm = (layer_role & 7) >> 1
    zero = gemm & 0
    step = key_entry(key_ptr, FIELDS, 2) if PER_CALL else zero
    seed = key_entry(key_ptr, FIELDS, 0)
    layer_signs = ((layer_role >> 3) << 3) + _SIGN_ROLE
    return philox(step, gemm, zero + PER_CALL, zero + _SIGN_WORD, seed, layer_signs)
