"""Adds an operator's observations to the recipe state in a single launch."""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def observe_kernel(pending_ptr, role_stride, running_ptr, count_stride, own_ptr, counts_ptr, n,
                   WITH_COUNTS: tl.constexpr, ROLES: tl.constexpr, FIELDS: tl.constexpr):  # fmt: skip
    """pending [n] = max(pending, own [n]) where own is finite; counts are added to running [n, FIELDS]."""
    role = tl.arange(0, ROLES)
    own = tl.load(own_ptr + role, mask=role < n, other=-1.0)
    finite = (own >= 0.0) & (own < float("inf"))
    pending = pending_ptr + role * role_stride
    before = tl.load(pending, mask=finite, other=0.0)
    tl.store(pending, tl.maximum(before, own), mask=finite)
    if WITH_COUNTS:
        row, field = tl.arange(0, ROLES)[:, None], tl.arange(0, FIELDS)[None, :]
        counts = tl.load(counts_ptr + row * FIELDS + field, mask=row < n, other=0)
        running = running_ptr + row * count_stride + field
        tl.store(running, tl.load(running, mask=row < n, other=0) + counts, mask=row < n)


def observe(pending: Tensor, running: Tensor, own: Tensor, counts: Tensor, with_counts: bool) -> None:
    """pending: fp32 [n], strided; running: int64 [n, 4], strided; own, counts: likewise, but contiguous."""
    observe_kernel[(1,)](
        pending,
        pending.stride(0),
        running,
        running.stride(0),
        own,
        counts,
        own.shape[0],
        WITH_COUNTS=with_counts,
        ROLES=8,
        FIELDS=4,
        num_warps=1,
    )
