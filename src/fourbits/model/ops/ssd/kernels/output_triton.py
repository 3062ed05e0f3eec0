"""The scan's output: the masked product within a chunk, the contribution of its first state, and the skip."""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (Triton types the kernels)

import triton
import triton.language as tl

from fourbits.model.ops.ssd.kernels.decays_triton import FROM_START, HIGH, LOW, ROWS, SIZES, STEP, span_decay


@triton.jit(do_not_specialize=[*SIZES, "HEADS"])
def output_kernel(x_ptr, x_batch, x_token, x_head, b_ptr, b_batch, b_token, b_group, c_ptr, c_batch, c_token,
                  c_group, d_ptr, table_ptr, segment_ptr, states_ptr, y_ptr, T, H, Z, R, HEADS,
                  P: tl.constexpr, N: tl.constexpr, HAS_STARTS: tl.constexpr, Q: tl.constexpr,
                  BP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Write y [B, T, H, P], contiguous.

    states: [B, Z, H, P, N] at the start of each chunk; d: fp32 [H]; R: heads per group. The P columns of a
    head are processed as tiles of BP and BT columns.
    Grid: blocks of HEADS heads of one group, which share c b^T; chunks; sequences.
    """
    z, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * HEADS
    group = first // R
    q, p, n = tl.arange(0, Q), tl.arange(0, BP), tl.arange(0, BN)
    token = z * Q + q
    real, far = (token < T)[:, None], token[:, None].to(tl.int64)
    b_ptr += batch * b_batch + group * b_group + far * b_token + n[None, :]
    c_ptr += batch * c_batch + group * c_group + far * c_token + n[None, :]
    wide = real & (n < N)[None, :]
    b, c = tl.load(b_ptr, mask=wide, other=0.0), tl.load(c_ptr, mask=wide, other=0.0)
    scores = tl.dot(c, tl.trans(b), input_precision="ieee")  # [Q (t), Q (s)]
    seen = q[:, None] >= q[None, :]
    if HAS_STARTS:
        segment = tl.load(segment_ptr + batch * Z * Q + token)
        seen = seen & (segment[:, None] == segment[None, :])
    scores = tl.where(seen, scores, 0.0)
    x_ptr += batch * x_batch + far * x_token
    y_ptr += (batch * T + far) * H * P
    states_ptr += (batch * Z + z) * H * P * N + n[None, :]
    table_ptr += batch * H * ROWS * Z * Q + token
    for head in range(first, first + HEADS):
        decays = table_ptr + head * ROWS * Z * Q
        high, low = tl.load(decays + HIGH * Z * Q), tl.load(decays + LOW * Z * Q)
        step, from_start = tl.load(decays + STEP * Z * Q), tl.load(decays + FROM_START * Z * Q)
        skip = tl.load(d_ptr + head)
        decay = span_decay(high[:, None] - high[None, :], low[:, None] - low[None, :])
        weights = (scores * decay * step[None, :]).to(b.dtype)

        inside, matrix = real & (p < P)[None, :], (p < P)[:, None] & (n < N)[None, :]
        x = tl.load(x_ptr + head * x_head + p[None, :], mask=inside, other=0.0)
        state = tl.load(states_ptr + (head * P + p[:, None]) * N, mask=matrix, other=0.0)
        y = tl.dot(c, tl.trans(state), input_precision="ieee") * from_start[:, None]
        y = tl.dot(weights, x, y, input_precision="ieee") + skip * x.to(tl.float32)
        tl.store(y_ptr + head * P + p[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
        if BT:
            tail = BP + tl.arange(0, BT)
            inside, matrix = real & (tail < P)[None, :], (tail < P)[:, None] & (n < N)[None, :]
            x = tl.load(x_ptr + head * x_head + tail[None, :], mask=inside, other=0.0)
            state = tl.load(states_ptr + (head * P + tail[:, None]) * N, mask=matrix, other=0.0)
            y = tl.dot(c, tl.trans(state), input_precision="ieee") * from_start[:, None]
            y = tl.dot(weights, x, y, input_precision="ieee") + skip * x.to(tl.float32)
            tl.store(y_ptr + head * P + tail[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
