"""The scan by fused kernels, as an operator: opaque to torch.compile, recorded by CUDA graphs."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import custom_op

from fourbits.model.layout import by_rows
from fourbits.triton_version import HAS_TRITON, installed_triton, version_unsupported

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.model import ssd_triton as kernels

MIN_CAPABILITY = (8, 0)
#: elements of a state with both sides padded to powers of two: what fits in shared memory twice
MAX_STATE = 128 * 128


@custom_op("fourbits::ssd_forward", mutates_args=())
def ssd_forward(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, starts: Tensor | None
) -> Tensor:
    """The scan by kernels: y [B, T, H, P] in x's dtype, contiguous.

    x: [B, T, H, P]; b, c: [B, T, G, N] in x's dtype, bf16 (in Triton's interpreter also fp32); dt: fp32
    [B, T, H]; a, d: fp32 [H]; starts: bool [B, T] or None. FP32 sums; products of numbers in x's dtype, but
    for the skip d x, which is FP32. y is rounded once.
    """
    x, dt, a, b, c, d = (by_rows(t) for t in (x, dt, a, b, c, d))
    return kernels.forward(x, dt, a, b, c, d, None if starts is None else starts.contiguous())


@ssd_forward.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, starts: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("fourbits::ssd_backward", mutates_args=())
def ssd_backward(
    dy: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, a, b, c and d, in their dtypes, contiguous."""
    dy, x, dt, a, b, c, d = (by_rows(t) for t in (dy, x, dt, a, b, c, d))
    return kernels.backward(dy, x, dt, a, b, c, d, None if starts is None else starts.contiguous())


@ssd_backward.register_fake
def _(
    dy: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, ddt, da, db, dc, dd = (t.new_empty(t.shape) for t in (x, dt, a, b, c, d))
    return dx, ddt, da, db, dc, dd


def _keep(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *ssd_backward(dy, *ctx.saved_tensors), None


ssd_forward.register_autograd(_gradients, setup_context=_keep)


def why_no_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, state_size: int) -> str | None:
    """Why the kernels do not run this scan on a device, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        kind = "rocm" if torch.version.hip is not None and device.type == "cuda" else device.type
        return f"the scan's kernels are for NVIDIA cards, x is on {kind}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"the scan's kernels need sm_80 or newer, this is sm_{capability[0]}{capability[1]}"
    if reason := version_unsupported(installed_triton()):
        return reason
    if dtype != torch.bfloat16:
        return f"the scan's kernels multiply BF16 numbers, activations are {dtype}"
    if head_dim % 8 or state_size % 16 or _padded(head_dim) * _padded(state_size) > MAX_STATE:
        return (
            "the scan's kernels take heads of a multiple of 8 and states of a multiple of 16, together up to "
            f"64 x 256 or 128 x 128, got {head_dim} x {state_size}"
        )
    return None


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()
