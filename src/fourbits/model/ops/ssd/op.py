"""The SSD scan: in chunks in PyTorch, or by Triton kernels on a GPU.

The kernels are a custom operator, opaque to torch.compile and recorded by CUDA graphs.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import custom_op

from fourbits.device import probe, unsupported_triton
from fourbits.model.ops.inputs import unit_stride
from fourbits.model.ops.ssd.chunked import chunked_ssd
from fourbits.operators import OVERLOAD
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.model.ops.ssd.kernels import ssd_triton as kernels

#: largest state, in elements with both dimensions padded to powers of two: two of them fit in shared memory
MAX_STATE = 128 * 128


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    chunk_size: int,
    starts: Tensor | None = None,
    fused: bool = False,
) -> Tensor:
    """Run the scan in FP32 (FP64 arguments stay FP64). fused: by the kernels, see `ssd_forward`.

    x: [B, T, H, P]; dt: [B, T, H] >= 0; a: [H] < 0; b, c: [B, T, G, N] with H a multiple of G; d: [H], the
    skip connection; any T; starts: bool [B, T], the tokens before which the state is reset, or None. Returns
    [B, T, H, P] in FP32, or from the kernels in x's dtype. The kernels choose their own chunks.
    """
    if fused:
        return ssd_forward(x, dt, a, b, c, d, starts)
    return chunked_ssd(x, dt, a, b, c, d, chunk_size, starts)


@custom_op(f"fourbits::ssd_forward.{OVERLOAD}", mutates_args=())
def ssd_forward(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, starts: Tensor | None
) -> Tensor:
    """The scan by the kernels: y [B, T, H, P] in x's dtype, contiguous.

    x: [B, T, H, P]; b, c: [B, T, G, N] in x's dtype, bf16 (in Triton's interpreter also fp32); dt: fp32
    [B, T, H]; a, d: fp32 [H]; starts: bool [B, T] or None. Factors have x's dtype and sums are FP32; the skip
    connection d x is FP32 throughout. y is rounded once.
    """
    x, dt, a, b, c, d = (unit_stride(t) for t in (x, dt, a, b, c, d))
    return kernels.forward(x, dt, a, b, c, d, None if starts is None else starts.contiguous())


@ssd_forward.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, starts: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@custom_op(f"fourbits::ssd_backward.{OVERLOAD}", mutates_args=())
def ssd_backward(
    dy: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, a, b, c and d, in their dtypes; all contiguous."""
    dy, x, dt, a, b, c, d = (unit_stride(t) for t in (dy, x, dt, a, b, c, d))
    return kernels.backward(dy, x, dt, a, b, c, d, None if starts is None else starts.contiguous())


@ssd_backward.register_fake
def _(
    dy: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, ddt, da, db, dc, dd = (t.new_empty(t.shape) for t in (x, dt, a, b, c, d))
    return dx, ddt, da, db, dc, dd


def ssd_with_state(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, starts: Tensor | None, state: Tensor
) -> Tensor:
    """`ssd_forward` without gradients; writes the state after the last token to `state`, fp32 [B, H, P, N].

    Tokens whose dt is 0 do not change the state.
    """
    x, dt, a, b, c, d = (unit_stride(t) for t in (x, dt, a, b, c, d))
    starts = None if starts is None else starts.contiguous()
    return kernels.forward(x, dt, a, b, c, d, starts, final=state)


def _save_inputs(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *ssd_backward(dy, *ctx.saved_tensors), None


ssd_forward.register_autograd(_gradients, setup_context=_save_inputs)


def unsupported(device: torch.device, dtype: torch.dtype, head_dim: int, state_size: int) -> str | None:
    """Why the kernels cannot run this scan on a device, or None."""
    if reason := unsupported_triton(probe(device)):
        return reason
    if dtype != torch.bfloat16:
        return f"the kernels of the SSD scan need BF16 activations, got {dtype}"
    if head_dim % 8 or state_size % 16 or _padded(head_dim) * _padded(state_size) > MAX_STATE:
        return (
            "the kernels of the SSD scan need head dims that are multiples of 8 and state sizes that are "
            f"multiples of 16, together up to 64 x 256 or 128 x 128, got {head_dim} x {state_size}"
        )
    return None


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()
