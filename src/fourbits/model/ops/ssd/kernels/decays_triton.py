"""Decays of the SSD scan: running sums of a chunk's log-decays, and the factors derived from them.

Sums are FP64, in units of log 2, and are stored as two FP32 numbers each. So the difference of two sums has
FP32 accuracy relative to its own size, however large the sums are. The start of a document does not enter a
sum. It starts a new segment, and tokens of different segments of a chunk do not see each other.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (Triton types the kernels)

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

# Rows of the table of decays [B, H, 5, Z * Q].
HIGH = tl.constexpr(0)  # the sum up to and including a token, rounded to FP32
LOW = tl.constexpr(1)  # the rounding error of HIGH
FROM_START = tl.constexpr(2)  # decay from the chunk's start to the token, included
TO_END = tl.constexpr(3)  # decay from the token to the chunk's end
STEP = tl.constexpr(4)  # dt; 0 after the last token
ROWS = tl.constexpr(5)

# Sizes that are not compile-time constants: all shapes with one head dim and state size run the same code.
SIZES = ["T", "H", "Z", "R"]


@triton.jit(do_not_specialize=["dt_batch", "dt_token", *SIZES])
def decays_kernel(dt_ptr, dt_batch, dt_token, a_ptr, starts_ptr, table_ptr, chunk_ptr, segment_ptr,
                  T, H, Z, HAS_STARTS: tl.constexpr, Q: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """Write the table, the decay over a whole chunk, fp32 [B, H, Z], and segments, int32 [B, Z * Q].

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
    """exp of differences of sums, each stored as two numbers (HIGH, LOW); 1 for spans that run backwards.

    Without the minimum those would overflow. Because they are finite, the caller can mask them once, outside
    its loop; masking by position inside costs a comparison and a select per entry.
    """
    return tl.exp2(tl.minimum(high + low, 0.0, propagate_nan=tl.PropagateNan.ALL))
