"""Gradients of the scan from one visit of a chunk, head by head of a group; then sums over the heads.

With CB = c b^T, E the decay from token s to token t, and S and D the state at the chunk's start and the
gradient of the state at its end:

    dx_s   = dt_s (sum_t CB_ts E_ts dy_t + to_end_s D b_s)
    dCB_ts = sum over heads of E_ts dt_s <dy_t, x_s>
    dc = dCB b + sum of (from_start dy) S,   db = dCB^T c + sum of (to_end dt x) D.

A log-decay of token u acts on what was there before u and is read from u on. With e_ts = CB_ts E_ts dt_s
<dy_t, x_s>, and with carried_t, what the state at the start gives y_t, and added_s, what token s gives the
state at the end, both times their gradients,

    dlog_u = sum_{s < u <= t} e_ts + sum_{t >= u} carried_t + sum_{s < u} added_s + decay of chunk <D, S>.

The first sum is that of e's rows minus that of its columns, t and s >= u. Both come from the same FP32
entries, so what has to cancel does.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.model.ssd_decays_triton import FROM_START, HIGH, LOW, ROWS, SIZES, STEP, TO_END, span_decay


@triton.jit(do_not_specialize=[*SIZES, "G"])
def inputs_kernel(dy_ptr, dy_batch, dy_token, dy_head, x_ptr, x_batch, x_token, x_head, b_ptr, b_batch,
                  b_token, b_group, c_ptr, c_batch, c_token, c_group, a_ptr, table_ptr, chunk_ptr,
                  segment_ptr, states_ptr, ends_ptr, dx_ptr, ddt_ptr, da_ptr, dscores_ptr, T, H, Z, R, G,
                  P: tl.constexpr, N: tl.constexpr, HAS_STARTS: tl.constexpr, Q: tl.constexpr,
                  BP: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Write dx [B, T, H, P], ddt [B, T, H], da's parts [B, Z, H] and dCB^T [B, Z, G, Q, Q], all contiguous.

    states: at chunks' starts, ends: gradients at chunks' ends, [B, Z, H, P, N]; R: heads of a group.
    Grid: G, chunks, sequences. Tiles are [Q (s), Q (t)], so that the product for dx needs none turned.
    """
    group, z, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    q, p, n = tl.arange(0, Q), tl.arange(0, BP), tl.arange(0, BN)
    token = z * Q + q
    real, far = token < T, token.to(tl.int64)
    wide = real[:, None] & (n < N)[None, :]
    narrow = real[:, None] & (p < P)[None, :]
    matrix = (p < P)[:, None] & (n < N)[None, :]
    b_ptr += batch * b_batch + group * b_group + far[:, None] * b_token + n[None, :]
    c_ptr += batch * c_batch + group * c_group + far[:, None] * c_token + n[None, :]
    b, c = tl.load(b_ptr, mask=wide, other=0.0), tl.load(c_ptr, mask=wide, other=0.0)
    scores = tl.dot(b, tl.trans(c), input_precision="ieee")
    seen = q[:, None] <= q[None, :]
    if HAS_STARTS:
        segment = tl.load(segment_ptr + batch * Z * Q + token)
        seen = seen & (segment[:, None] == segment[None, :])
    x_ptr += batch * x_batch + far[:, None] * x_token + p[None, :]
    dy_ptr += batch * dy_batch + far[:, None] * dy_token + p[None, :]
    dx_ptr += (batch * T + far)[:, None] * H * P + p[None, :]
    ddt_ptr += (batch * T + far) * H
    bounds = (batch * Z + z) * H * P * N + p[:, None] * N + n[None, :]
    table_ptr += batch * H * ROWS * Z * Q + token
    dscores = tl.zeros((Q, Q), tl.float32)
    for head in range(group * R, group * R + R):
        x = tl.load(x_ptr + head * x_head, mask=narrow, other=0.0)
        dy = tl.load(dy_ptr + head * dy_head, mask=narrow, other=0.0)
        state = tl.load(states_ptr + bounds + head * (P * N), mask=matrix, other=0.0)
        end = tl.load(ends_ptr + bounds + head * (P * N), mask=matrix, other=0.0)
        decays = table_ptr + head * ROWS * Z * Q
        high, low = tl.load(decays + HIGH * Z * Q), tl.load(decays + LOW * Z * Q)
        from_start, to_end = tl.load(decays + FROM_START * Z * Q), tl.load(decays + TO_END * Z * Q)
        step = tl.load(decays + STEP * Z * Q)

        carried = tl.sum(tl.dot(c, tl.trans(state), input_precision="ieee") * dy.to(tl.float32), 1)
        whole = tl.sum(state.to(tl.float32) * end.to(tl.float32))
        whole *= tl.load(chunk_ptr + (batch * H + head) * Z + z)
        dx = tl.dot(b, tl.trans(end), input_precision="ieee") * to_end[:, None]
        added = tl.sum(dx * x.to(tl.float32), 1)

        decay = span_decay(-high, -low, -high, -low, seen)
        along = tl.dot(x, tl.trans(dy), input_precision="ieee") * decay
        dscores += along * step[:, None]
        along *= scores
        columns, rows = tl.sum(along, 1), tl.sum(along * step[:, None], 0)
        dx = tl.dot((scores * decay).to(dy.dtype), dy, dx, input_precision="ieee") * step[:, None]
        tl.store(dx_ptr + head * P, dx.to(dx_ptr.dtype.element_ty), mask=narrow)

        before = added * step
        dlog = tl.cumsum(rows + carried * from_start - columns * step, 0, reverse=True)
        dlog += tl.cumsum(before, 0) - before + whole
        ddt = dlog * tl.load(a_ptr + head) + columns + added
        tl.store(ddt_ptr + head, ddt, mask=real)
        # The last of running sums, not a sum: Triton 3.6 fails on sums of sums of products for sm_100.
        da = tl.cumsum(dlog * step, 0)
        tl.store(da_ptr + (batch * Z + z) * H + head + 0 * q, da, mask=q == Q - 1)
    place = dscores_ptr + ((batch * Z + z) * G + group) * Q * Q + q[:, None] * Q + q[None, :]
    tl.store(place, dscores.to(dscores_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=[*SIZES, "G"])
def groups_kernel(x_ptr, x_batch, x_token, x_head, c_ptr, c_batch, c_token, c_group, table_ptr, dscores_ptr,
                  ends_ptr, db_ptr, T, H, Z, R, G, P: tl.constexpr, N: tl.constexpr, READ: tl.constexpr,
                  Q: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Write db [B, T, G, N], contiguous, from x, c and the gradients at chunks' ends; READ: dc, from dy, b
    and the states at chunks' starts in their places.

    Grid: G, chunks, sequences. R: heads of a group.
    """
    group, z, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    q, p, n = tl.arange(0, Q), tl.arange(0, BP), tl.arange(0, BN)
    token = z * Q + q
    real, far = token < T, token.to(tl.int64)
    wide = real[:, None] & (n < N)[None, :]
    narrow = real[:, None] & (p < P)[None, :]
    matrix = (p < P)[:, None] & (n < N)[None, :]
    x_ptr += batch * x_batch + far[:, None] * x_token + p[None, :]
    ends_ptr += (batch * Z + z) * H * P * N + p[:, None] * N + n[None, :]
    table_ptr += batch * H * ROWS * Z * Q + token
    db = tl.zeros((Q, BN), tl.float32)
    for head in range(group * R, group * R + R):
        x = tl.load(x_ptr + head * x_head, mask=narrow, other=0.0)
        end = tl.load(ends_ptr + head * (P * N), mask=matrix, other=0.0)
        decays = table_ptr + head * ROWS * Z * Q
        if READ:
            weight = tl.load(decays + FROM_START * Z * Q)
        else:
            weight = tl.load(decays + TO_END * Z * Q) * tl.load(decays + STEP * Z * Q)
        written = (x.to(tl.float32) * weight[:, None]).to(x.dtype)
        db = tl.dot(written, end, db, input_precision="ieee")
    dscores_ptr += ((batch * Z + z) * G + group) * Q * Q
    if READ:
        dscores = tl.load(dscores_ptr + q[None, :] * Q + q[:, None])
    else:
        dscores = tl.load(dscores_ptr + q[:, None] * Q + q[None, :])
    c_ptr += batch * c_batch + group * c_group + far[:, None] * c_token + n[None, :]
    db = tl.dot(dscores, tl.load(c_ptr, mask=wide, other=0.0), db, input_precision="ieee")
    db_ptr += (batch * T + far)[:, None] * G * N + group * N + n[None, :]
    tl.store(db_ptr, db.to(db_ptr.dtype.element_ty), mask=wide)
