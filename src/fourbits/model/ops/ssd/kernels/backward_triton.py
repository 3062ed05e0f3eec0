"""Gradients of the SSD scan: within chunks, then across chunk boundaries, then the sum of both.

With CB = c b^T, E the decay from token s to token t, and S and D the state at the chunk's start and the
gradient of the state at its end:

    dx_s   = dt_s (sum_t CB_ts E_ts dy_t + to_end_s D b_s) + d dy_s,   dd = sum of <dy_s, x_s>
    dCB_ts = sum over heads of E_ts dt_s <dy_t, x_s>
    dc = dCB b + sum of (from_start dy) S,   db = dCB^T c + sum of (to_end dt x) D.

The log-decay of token u scales everything written before u that is read at u or later. Let e_ts = CB_ts E_ts
dt_s <dy_t, x_s>. Let carried_t = from_start_t <dy_t S, c_t>, the contribution of the state at the start to
y_t times the gradient of y_t, and added_s = to_end_s dt_s <x_s D, b_s>, the contribution of token s to the
state at the end times the gradient of that state. Then

    dlog_u = sum_{s < u <= t} e_ts + sum_{t >= u} carried_t + sum_{s < u} added_s + decay of chunk <D, S>.

The first sum is a product of e with a triangle of ones, which adds the terms with s < u, masked and summed
over t >= u; e is rounded like dx's weights. Only terms of dlog_u are added. The sums of e's rows and columns
for t and s >= u have the same difference, but both contain e_tt and all other spans that begin at u or later:
where decays are strong, FP32 keeps no digit of it. The skip connection d x does not pass through a state and
has no part here; its <dy_s, x_s> is the diagonal of the matrix that dCB is computed from. dc and db need dy S
and x D anyway; so `inputs_kernel` does not read S, and `groups_kernel` does not read the decays between
tokens.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (Triton types the kernels)

import triton
import triton.language as tl

from fourbits.model.ops.ssd.kernels.decays_triton import (
    FROM_START,
    HIGH,
    LOW,
    ROWS,
    SIZES,
    STEP,
    TO_END,
    span_decay,
)

# Rows of the sums within chunks, [B, H, 3, Z * Q], and of those across boundaries, [B, parts, H, 2, Z * Q].
ACROSS_NEXT = tl.constexpr(0)  # sum of e_ts over s <= u < t, which the log-decay of token u + 1 scales
E_COLUMNS = tl.constexpr(1)  # sum of e_ts over t, divided by dt_s
DIAGONAL, WITHIN = tl.constexpr(2), tl.constexpr(3)  # <dy_t, x_t>; the number of rows
CARRIED, ADDED = tl.constexpr(0), tl.constexpr(1)  # <dy_t S, c_t>; <x_s D, b_s>


@triton.jit(do_not_specialize=[*SIZES, "G"])
def inputs_kernel(dy_ptr, dy_batch, dy_token, dy_head, x_ptr, x_batch, x_token, x_head, b_ptr, b_batch,
                  b_token, b_group, c_ptr, c_batch, c_token, c_group, d_ptr, table_ptr, segment_ptr,
                  ends_ptr, dx_ptr, within_ptr, dscores_ptr, T, H, Z, R, G, P: tl.constexpr,
                  N: tl.constexpr, HAS_STARTS: tl.constexpr, Q: tl.constexpr, BP: tl.constexpr,
                  BT: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Write dx [B, T, H, P], the sums within chunks, and dCB^T [B, Z, G, Q, Q], all contiguous.

    ends: gradients of the states at chunk ends, [B, Z, H, P, N]; d: fp32 [H]; R: heads per group. The P
    columns of a head are processed as tiles of BP and BT columns.
    Grid: G, chunks, sequences. Tiles are [Q (s), Q (t)], so that no operand of dx's product is transposed.
    """
    group, z, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    q, p, n = tl.arange(0, Q), tl.arange(0, BP), tl.arange(0, BN)
    token = z * Q + q
    real, far = token < T, token.to(tl.int64)
    wide = real[:, None] & (n < N)[None, :]
    b_ptr += batch * b_batch + group * b_group + far[:, None] * b_token + n[None, :]
    c_ptr += batch * c_batch + group * c_group + far[:, None] * c_token + n[None, :]
    b = tl.load(b_ptr, mask=wide, other=0.0)
    scores = tl.dot(b, tl.trans(tl.load(c_ptr, mask=wide, other=0.0)), input_precision="ieee")
    seen = q[:, None] <= q[None, :]
    if HAS_STARTS:
        segment = tl.load(segment_ptr + batch * Z * Q + token)
        seen = seen & (segment[:, None] == segment[None, :])
    scores = tl.where(seen, scores, 0.0)
    until = (q[:, None] >= q[None, :]).to(b.dtype)  # [Q (u), Q (s)]
    x_ptr += batch * x_batch + far[:, None] * x_token
    dy_ptr += batch * dy_batch + far[:, None] * dy_token
    dx_ptr += (batch * T + far)[:, None] * H * P
    ends_ptr += (batch * Z + z) * H * P * N + n[None, :]
    table_ptr += batch * H * ROWS * Z * Q + token
    within_ptr += batch * H * WITHIN * Z * Q + z * Q
    dscores = tl.zeros((Q, Q), tl.float32)
    last = group * R + R - 1
    ahead = table_ptr + group * R * ROWS * Z * Q
    next_step, next_to_end = tl.load(ahead + STEP * Z * Q), tl.load(ahead + TO_END * Z * Q)
    # Addresses that the compiler would compute before the loop do not fit in registers.
    for head in tl.range(group * R, last + 1, disable_licm=True):
        step, to_end = next_step, next_to_end  # loaded one head ahead: the compiler does not do it
        ahead = table_ptr + tl.minimum(head + 1, last) * ROWS * Z * Q
        next_step, next_to_end = tl.load(ahead + STEP * Z * Q), tl.load(ahead + TO_END * Z * Q)
        narrow = real[:, None] & (p < P)[None, :]
        x = tl.load(x_ptr + head * x_head + p[None, :], mask=narrow, other=0.0)
        dy = tl.load(dy_ptr + head * dy_head + p[None, :], mask=narrow, other=0.0)
        along = tl.dot(x, tl.trans(dy), input_precision="ieee")
        if BT:
            tail = BP + tl.arange(0, BT)
            short = real[:, None] & (tail < P)[None, :]
            x_tail = tl.load(x_ptr + head * x_head + tail[None, :], mask=short, other=0.0)
            dy_tail = tl.load(dy_ptr + head * dy_head + tail[None, :], mask=short, other=0.0)
            along = tl.dot(x_tail, tl.trans(dy_tail), along, input_precision="ieee")
        sums = within_ptr + head * WITHIN * Z * Q
        tl.store(sums + DIAGONAL * Z * Q + q, tl.sum(tl.where(q[:, None] == q[None, :], along, 0.0), 1))
        decays = table_ptr + head * ROWS * Z * Q
        high, low = tl.load(decays + HIGH * Z * Q), tl.load(decays + LOW * Z * Q)
        skip = tl.load(d_ptr + head)
        decay = span_decay(high[None, :] - high[:, None], low[None, :] - low[:, None])
        along *= decay
        stepped = along * step[:, None]
        dscores += stepped
        weights, pairs = (scores * decay).to(b.dtype), (stepped * scores).to(b.dtype)
        columns = tl.sum(along * scores, 1)

        matrix = (p < P)[:, None] & (n < N)[None, :]
        end = tl.load(ends_ptr + (head * P + p[:, None]) * N, mask=matrix, other=0.0)
        dx = tl.dot(b, tl.trans(end), input_precision="ieee") * to_end[:, None]
        dx = tl.dot(weights, dy, dx, input_precision="ieee") * step[:, None]
        dx += skip * dy.to(tl.float32)
        tl.store(dx_ptr + head * P + p[None, :], dx.to(dx_ptr.dtype.element_ty), mask=narrow)
        if BT:
            matrix = (tail < P)[:, None] & (n < N)[None, :]
            end = tl.load(ends_ptr + (head * P + tail[:, None]) * N, mask=matrix, other=0.0)
            dx = tl.dot(b, tl.trans(end), input_precision="ieee") * to_end[:, None]
            dx = tl.dot(weights, dy_tail, dx, input_precision="ieee") * step[:, None]
            dx += skip * dy_tail.to(tl.float32)
            tl.store(dx_ptr + head * P + tail[None, :], dx.to(dx_ptr.dtype.element_ty), mask=short)
        # Last, because dx's accumulators and weights no longer need registers.
        written = tl.dot(until, pairs, input_precision="ieee")  # [Q (u), Q (t)]
        tl.store(sums + ACROSS_NEXT * Z * Q + q, tl.sum(tl.where(q[:, None] < q[None, :], written, 0.0), 1))
        tl.store(sums + E_COLUMNS * Z * Q + q, columns)
    dscores = tl.where(seen, dscores, 0.0)
    place = dscores_ptr + ((batch * Z + z) * G + group) * Q * Q + q[:, None] * Q + q[None, :]
    tl.store(place, dscores.to(dscores_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=[*SIZES, "G"])
def groups_kernel(dy_ptr, dy_batch, dy_token, dy_head, x_ptr, x_batch, x_token, x_head, b_ptr, b_batch,
                  b_token, b_group, c_ptr, c_batch, c_token, c_group, table_ptr, dscores_ptr, states_ptr,
                  ends_ptr, db_ptr, dc_ptr, across_ptr, T, H, Z, R, G, P: tl.constexpr,
                  N: tl.constexpr, Q: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr,
                  BN: tl.constexpr):  # fmt: skip
    """Write db, dc [B, T, G, N], contiguous, and this part's share of the sums across chunk boundaries.

    states: at chunk starts; ends: gradients at chunk ends; both [B, Z, H, P, N].
    Grid: parts of BN of the state times G, parts fastest so that they find x and dy in the cache; chunks;
    sequences.
    """
    parts = tl.cdiv(N, BN)
    part, group = tl.program_id(0) % parts, tl.program_id(0) // parts
    z, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    q, p, n = tl.arange(0, Q), tl.arange(0, BP), part * BN + tl.arange(0, BN)
    token = z * Q + q
    real, far = token < T, token.to(tl.int64)
    wide = real[:, None] & (n < N)[None, :]
    b_ptr += batch * b_batch + group * b_group + far[:, None] * b_token + n[None, :]
    c_ptr += batch * c_batch + group * c_group + far[:, None] * c_token + n[None, :]
    b, c = tl.load(b_ptr, mask=wide, other=0.0), tl.load(c_ptr, mask=wide, other=0.0)
    x_ptr += batch * x_batch + far[:, None] * x_token
    dy_ptr += batch * dy_batch + far[:, None] * dy_token
    bounds = (batch * Z + z) * H * P * N + n[None, :]
    table_ptr += batch * H * ROWS * Z * Q + token
    across_ptr += (batch * parts + part) * H * 2 * Z * Q + token
    db, dc = tl.zeros((Q, BN), tl.float32), tl.zeros((Q, BN), tl.float32)
    last = group * R + R - 1
    ahead = table_ptr + group * R * ROWS * Z * Q
    next_step, next_to_end = tl.load(ahead + STEP * Z * Q), tl.load(ahead + TO_END * Z * Q)
    next_from_start = tl.load(ahead + FROM_START * Z * Q)
    for head in range(group * R, last + 1):
        written, from_start = next_step * next_to_end, next_from_start  # loaded one head ahead
        ahead = table_ptr + tl.minimum(head + 1, last) * ROWS * Z * Q
        next_step, next_to_end = tl.load(ahead + STEP * Z * Q), tl.load(ahead + TO_END * Z * Q)
        next_from_start = tl.load(ahead + FROM_START * Z * Q)
        narrow = real[:, None] & (p < P)[None, :]
        matrix = bounds + (head * P + p[:, None]) * N
        inside = (p < P)[:, None] & (n < N)[None, :]
        across = across_ptr + head * 2 * Z * Q
        if BT:
            tail = BP + tl.arange(0, BT)
            short = real[:, None] & (tail < P)[None, :]
            matrix_tail = bounds + (head * P + tail[:, None]) * N
            inside_tail = (tail < P)[:, None] & (n < N)[None, :]

        dy = tl.load(dy_ptr + head * dy_head + p[None, :], mask=narrow, other=0.0)
        state = tl.load(states_ptr + matrix, mask=inside, other=0.0)
        product = tl.dot(dy, state, input_precision="ieee")
        if BT:
            dy = tl.load(dy_ptr + head * dy_head + tail[None, :], mask=short, other=0.0)
            state = tl.load(states_ptr + matrix_tail, mask=inside_tail, other=0.0)
            product = tl.dot(dy, state, product, input_precision="ieee")
        tl.store(across + CARRIED * Z * Q, tl.sum(product * c.to(tl.float32), 1))
        dc += product * from_start[:, None]

        x = tl.load(x_ptr + head * x_head + p[None, :], mask=narrow, other=0.0)
        end = tl.load(ends_ptr + matrix, mask=inside, other=0.0)
        product = tl.dot(x, end, input_precision="ieee")
        if BT:
            x = tl.load(x_ptr + head * x_head + tail[None, :], mask=short, other=0.0)
            end = tl.load(ends_ptr + matrix_tail, mask=inside_tail, other=0.0)
            product = tl.dot(x, end, product, input_precision="ieee")
        tl.store(across + ADDED * Z * Q, tl.sum(product * b.to(tl.float32), 1))
        db += product * written[:, None]
    dscores_ptr += ((batch * Z + z) * G + group) * Q * Q
    place = (batch * T + far)[:, None] * G * N + group * N + n[None, :]
    dscores = tl.load(dscores_ptr + q[:, None] * Q + q[None, :])
    db = tl.dot(dscores, c, db, input_precision="ieee")
    tl.store(db_ptr + place, db.to(db_ptr.dtype.element_ty), mask=wide)
    dc = tl.dot(tl.trans(dscores), b, dc, input_precision="ieee")
    tl.store(dc_ptr + place, dc.to(dc_ptr.dtype.element_ty), mask=wide)


@triton.jit(do_not_specialize=[*SIZES])
def steps_kernel(a_ptr, table_ptr, chunk_ptr, within_ptr, across_ptr, products_ptr, ddt_ptr, da_ptr, dd_ptr,
                 T, H, Z, PARTS: tl.constexpr, TILES: tl.constexpr, Q: tl.constexpr,
                 HEADS: tl.constexpr):  # fmt: skip
    """Write ddt [B, T, H] and partial sums of da and dd [B, Z, H], contiguous, from the other kernels' sums.

    Grid: chunks, blocks of HEADS heads, sequences.
    """
    z, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    q = tl.arange(0, Q)
    token = z * Q + q
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    known = (head < H)[:, None] & (token < Z * Q)[None, :]
    later = known & (q > 0)[None, :]  # tokens with one before them in the chunk, at their pointers minus 1
    decays = table_ptr + (batch * H + head)[:, None] * ROWS * Z * Q + token[None, :]
    step = tl.load(decays + STEP * Z * Q, mask=known, other=0.0)
    within = within_ptr + (batch * H + head)[:, None] * WITHIN * Z * Q + token[None, :]
    pairs = tl.load(within + ACROSS_NEXT * Z * Q - 1, mask=later, other=0.0)
    columns = tl.load(within + E_COLUMNS * Z * Q, mask=known, other=0.0)
    diagonal = tl.load(within + DIAGONAL * Z * Q, mask=known, other=0.0)
    carried, added = tl.zeros((HEADS, Q), tl.float32), tl.zeros((HEADS, Q), tl.float32)
    before, whole = tl.zeros((HEADS, Q), tl.float32), tl.zeros((HEADS,), tl.float32)
    for part in tl.static_range(PARTS):
        row = (batch * PARTS + part) * H + head
        across = across_ptr + row[:, None] * 2 * Z * Q + token[None, :]
        carried += tl.load(across + CARRIED * Z * Q, mask=known, other=0.0)
        added += tl.load(across + ADDED * Z * Q, mask=known, other=0.0)
        before += tl.load(across + ADDED * Z * Q - 1, mask=later, other=0.0)
    for part in tl.static_range(TILES):
        row = (batch * H + head) * TILES + part
        whole += tl.load(products_ptr + row * Z + z, mask=head < H, other=0.0)
    added *= tl.load(decays + TO_END * Z * Q, mask=known, other=0.0)
    before *= tl.load(decays + TO_END * Z * Q - 1, mask=later, other=0.0)
    before *= tl.load(decays + STEP * Z * Q - 1, mask=later, other=0.0)
    carried *= tl.load(decays + FROM_START * Z * Q, mask=known, other=0.0)
    whole *= tl.load(chunk_ptr + (batch * H + head) * Z + z, mask=head < H, other=0.0)
    # A sum of `added` minus its last term would keep the rounding errors of that term.
    dlog = pairs + tl.cumsum(carried, 1, reverse=True) + tl.cumsum(before, 1) + whole[:, None]
    ddt = dlog * tl.load(a_ptr + head, mask=head < H, other=0.0)[:, None] + columns + added
    place = ddt_ptr + (batch * T + token)[None, :] * H + head[:, None]
    tl.store(place, ddt, mask=(head < H)[:, None] & (token < T)[None, :])
    part = (batch * Z + z) * H + head
    tl.store(da_ptr + part, tl.sum(dlog * step, 1), mask=head < H)
    tl.store(dd_ptr + part, tl.sum(diagonal, 1), mask=head < H)
