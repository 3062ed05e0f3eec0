"""States of the SSD scan at chunk boundaries, in one sweep over the sequence.

The state stays in FP32 registers for the whole sweep, and a rounded copy is stored at every boundary, so that
roundings do not accumulate. A backward sweep gives the gradients of the states at the ends of chunks.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (Triton types the kernels)

import triton
import triton.language as tl

from fourbits.model.ops.ssd.kernels.decays_triton import FROM_START, ROWS, SIZES, STEP, TO_END


@triton.jit(do_not_specialize=SIZES)
def states_kernel(x_ptr, x_batch, x_token, x_head, b_ptr, b_batch, b_token, b_group, table_ptr, chunk_ptr,
                  states_ptr, final_ptr, starts_ptr, products_ptr, T, H, Z, R, P: tl.constexpr,
                  N: tl.constexpr, BACKWARDS: tl.constexpr, Q: tl.constexpr, BP: tl.constexpr,
                  BN: tl.constexpr):  # fmt: skip
    """Write states [B, Z, H, P, N] at the start of each chunk, from x and b.

    final_ptr: also write the state after the last token, fp32 [B, H, P, N], unless None.
    BACKWARDS: write gradients at the end of each chunk instead, from dy and c passed as x and b, and their
    inner products with `starts`, the states at the starts of chunks: fp32 [B, H, tiles, Z].
    x: [B, T, H, P], b: [B, T, G, N], unit stride along the last axis; R: heads per group.
    Grid: B * H, tiles of P, tiles of N.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // H, row % H
    q = tl.arange(0, Q)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    x_ptr += batch * x_batch + head * x_head
    b_ptr += batch * b_batch + head // R * b_group
    table_ptr += row * ROWS * Z * Q
    inside = (p < P)[:, None] & (n < N)[None, :]
    place = states_ptr + (batch * Z * H + head) * P * N + p[:, None] * N + n[None, :]
    state = tl.zeros((BP, BN), tl.float32)
    if BACKWARDS:
        starts_ptr += (batch * Z * H + head) * P * N + p[:, None] * N + n[None, :]
        products_ptr += (row * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) * Z
        products_ptr += tl.program_id(2) * Z
        start = tl.load(starts_ptr + tl.cast(Z - 1, tl.int64) * H * P * N, mask=inside, other=0.0)
    for i in range(Z):
        z = Z - 1 - i if BACKWARDS else i
        tl.store(place + tl.cast(z, tl.int64) * H * P * N, state.to(states_ptr.dtype.element_ty), mask=inside)
        if BACKWARDS:
            current = start  # the next one is loaded a step ahead
            start = tl.load(
                starts_ptr + tl.cast(z - 1, tl.int64) * H * P * N, mask=inside & (z > 0), other=0.0
            )
            tl.store(products_ptr + z, tl.sum(state * current.to(tl.float32)))
        token = z * Q + q
        far = token.to(tl.int64)
        x = tl.load(x_ptr + far[None, :] * x_token + p[:, None],
                    mask=(token < T)[None, :] & (p < P)[:, None], other=0.0)  # fmt: skip
        b = tl.load(b_ptr + far[:, None] * b_token + n[None, :],
                    mask=(token < T)[:, None] & (n < N)[None, :], other=0.0)  # fmt: skip
        if BACKWARDS:
            weight = tl.load(table_ptr + FROM_START * Z * Q + token)
        else:
            weight = tl.load(table_ptr + TO_END * Z * Q + token) * tl.load(table_ptr + STEP * Z * Q + token)
        written = (x.to(tl.float32) * weight[None, :]).to(b.dtype)
        state *= tl.load(chunk_ptr + row * Z + z)
        state = tl.dot(written, b, state, input_precision="ieee")
    if final_ptr is not None:
        tl.store(final_ptr + row * P * N + p[:, None] * N + n[None, :], state, mask=inside)
