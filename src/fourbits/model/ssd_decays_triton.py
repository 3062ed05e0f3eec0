"""Decays of the scan inside kernels: running sums of the log-decays of a chunk, and what follows from them.

Sums are FP64, in units of log 2, and leave as two FP32 numbers, so that a difference of two sums is as exact
as its own size allows, however large the sums are. A document's start is no number in a sum but a segment:
tokens of different segments of a chunk do not see each other.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

# Rows of the table of decays [B, H, 5, Z * Q].
HIGH = tl.constexpr(0)  # the sum up to and with a token, rounded to FP32
LOW = tl.constexpr(1)  # what that rounding left
FROM_START = tl.constexpr(2)  # decay from the chunk's start to the token, which it includes
TO_END = tl.constexpr(3)  # decay from the token to the chunk's end
STEP = tl.constexpr(4)  # dt, 0 beyond the last token
ROWS = tl.constexpr(5)

# Sizes that kernels are not compiled anew for: all shapes of one head dim and state run the same code.
SIZES = ["T", "H", "Z", "R"]


@triton.jit(do_not_specialize=["dt_batch", "dt_token", *SIZES])
def decays_kernel(dt_ptr, dt_batch, dt_token, a_ptr, starts_ptr, table_ptr, chunk_ptr, segment_ptr,
                  T, H, Z, HAS_STARTS: tl.constexpr, Q: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """Write the table, the decay of whole chunks fp32 [B, H, Z], and segments int32 [B, Z * Q].

    dt: fp32 [B, T, H], unit stride along H; a: fp32 [H]; starts: int8 [B, T].
    Grid: chunks, blocks of HEADS heads, sequences.
    """
    z, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    token = z * Q + tl.arange(0, Q)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = (token < T)[:, None] & (head < H)[None, :]
    dt = tl.load(dt_ptr + batch * dt_batch + token[:, None].to(tl.int64) * dt_token + head[None, :],
                 mask=real, other=0.0)  # fmt: skip
    rate = tl.load(a_ptr + head, mask=head < H, other=0.0).to(tl.float64) * LOG2_E
    log = dt.to(tl.float64) * rate[None, :]
    total = tl.sum(log, 0)
    log = tl.cumsum(log, 0)
    high = log.to(tl.float32)
    from_start, to_end = tl.exp2(high), tl.exp2((total[None, :] - log).to(tl.float32))
    whole = tl.exp2(total.to(tl.float32))
    if HAS_STARTS:
        starts = tl.load(starts_ptr + batch * T + token, mask=token < T, other=0).to(tl.int32)
        segment, last = tl.cumsum(starts, 0), tl.sum(starts, 0)
        tl.store(segment_ptr + batch * Z * Q + token, segment)
        from_start = tl.where((segment == 0)[:, None], from_start, 0.0)
        to_end = tl.where((segment == last)[:, None], to_end, 0.0)
        whole = tl.where(last == 0, whole, 0.0)

    row = batch * H + head
    place = table_ptr + row[None, :] * (ROWS * Z * Q) + token[:, None]
    known = (head < H)[None, :]
    tl.store(place + HIGH * Z * Q, high, mask=known)
    tl.store(place + LOW * Z * Q, (log - high.to(tl.float64)).to(tl.float32), mask=known)
    tl.store(place + FROM_START * Z * Q, from_start, mask=known)
    tl.store(place + TO_END * Z * Q, to_end, mask=known)
    tl.store(place + STEP * Z * Q, dt, mask=known)
    tl.store(chunk_ptr + row * Z + z, whole, mask=head < H)


@triton.jit
def span_decay(high, low):
    """exp of differences of sums, given in two numbers each as in the table; 1 for spans that run backwards.

    Those would overflow. As they are finite, the caller may drop what they gave once, outside its loop: a
    choice by position inside costs a comparison and a select for every entry.
    """
    return tl.exp2(tl.minimum(high + low, 0.0, propagate_nan=tl.PropagateNan.ALL))
