"""The causal convolution with its SiLU, in one pass along the tokens, with FP32 sums.

A program iterates over a span of tokens of some channels and keeps the previous three inputs in registers. So
neither shifted copies nor the input of SiLU reach memory, and every element is read once, except the three
tokens at the span's bounds, which the neighboring program also reads. Four tokens are loaded at a time,
before any of them is used.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false
# (Triton types the kernels, and launches also pass compiler options)

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Tokens per program, forward and backward, and its channels, four per thread. Measured on an H200, where the
#: 512 channels of B and of C need many short spans to fill the GPU.
_SPANS, _CHANNELS, _WARPS = (32, 64), 256, 2


@triton.jit
def _row(x_ptr, x_token, token, T, column, inside):
    """Load one token, in FP32; zero before the first token and after the last."""
    real = inside & (token >= 0) & (token < T)
    return tl.load(x_ptr + token.to(tl.int64) * x_token + column, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _rows(x_ptr, x_token, token, T, column, inside):
    """Load four consecutive tokens."""
    return (
        _row(x_ptr, x_token, token, T, column, inside),
        _row(x_ptr, x_token, token + 1, T, column, inside),
        _row(x_ptr, x_token, token + 2, T, column, inside),
        _row(x_ptr, x_token, token + 3, T, column, inside),
    )


@triton.jit
def _before(documents_ptr, token, T, x1, x2, x3, HAS_DOCUMENTS: tl.constexpr):
    """The inputs 1, 2 and 3 tokens back, set to zero where they belong to another document."""
    if HAS_DOCUMENTS:
        here = _document(documents_ptr, token, T)
        x1 = tl.where(_document(documents_ptr, token - 1, T) == here, x1, 0.0)
        x2 = tl.where(_document(documents_ptr, token - 2, T) == here, x2, 0.0)
        x3 = tl.where(_document(documents_ptr, token - 3, T) == here, x3, 0.0)
    return x1, x2, x3


@triton.jit
def _document(documents_ptr, token, T):
    return tl.load(documents_ptr + token, mask=(token >= 0) & (token < T), other=-1)


@triton.jit
def _taps(taps_ptr, taps_row, bias_ptr, column, inside):
    """The taps of this token and of those 1, 2 and 3 back, and the bias."""
    return (
        tl.load(taps_ptr + 3 * taps_row + column, mask=inside, other=0.0),
        tl.load(taps_ptr + 2 * taps_row + column, mask=inside, other=0.0),
        tl.load(taps_ptr + taps_row + column, mask=inside, other=0.0),
        tl.load(taps_ptr + column, mask=inside, other=0.0),
        tl.load(bias_ptr + column, mask=inside, other=0.0),
    )


@triton.jit
def _sums(x0, x1, x2, x3, taps):
    return taps[4] + taps[0] * x0 + taps[1] * x1 + taps[2] * x2 + taps[3] * x3


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def conv_kernel(x_ptr, x_batch, x_token, taps_ptr, taps_row, bias_ptr, documents_ptr, y_ptr, T, C,
                HAS_DOCUMENTS: tl.constexpr, SPAN: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Write y [B, T, C], contiguous. Grid: blocks of channels, spans of tokens, sequences."""
    first, batch = tl.program_id(1) * SPAN, tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = column < C
    x_ptr += batch * x_batch
    y_ptr += batch * T * C + column
    documents_ptr += batch * T
    taps = _taps(taps_ptr, taps_row, bias_ptr, column, inside)
    x3, x2, x1, _ = _rows(x_ptr, x_token, first - 3, T, column, inside)
    for step in range(0, min(SPAN, T - first), 4):
        token = first + step
        a, b, c, d = _rows(x_ptr, x_token, token, T, column, inside)
        _activate(y_ptr, documents_ptr, token, T, C, a, x1, x2, x3, taps, inside, HAS_DOCUMENTS)
        _activate(y_ptr, documents_ptr, token + 1, T, C, b, a, x1, x2, taps, inside, HAS_DOCUMENTS)
        _activate(y_ptr, documents_ptr, token + 2, T, C, c, b, a, x1, taps, inside, HAS_DOCUMENTS)
        _activate(y_ptr, documents_ptr, token + 3, T, C, d, c, b, a, taps, inside, HAS_DOCUMENTS)
        x3, x2, x1 = b, c, d


@triton.jit
def _activate(y_ptr, documents_ptr, token, T, C, x0, x1, x2, x3, taps, inside, HAS_DOCUMENTS: tl.constexpr):
    x1, x2, x3 = _before(documents_ptr, token, T, x1, x2, x3, HAS_DOCUMENTS)
    z = _sums(x0, x1, x2, x3, taps)
    y = (z * _sigmoid(z)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token.to(tl.int64) * C, y, mask=inside & (token < T))


@triton.jit
def conv_backward_kernel(dy_ptr, dy_batch, dy_token, x_ptr, x_batch, x_token, taps_ptr, taps_row, bias_ptr,
                         documents_ptr, dx_ptr, sums_ptr, T, C, HAS_DOCUMENTS: tl.constexpr,
                         SPAN: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Write dx [B, T, C], contiguous, and each program's partial sums of the gradients of taps and bias.

    sums: fp32 [B, spans, 5, C], the gradients of the taps of 3, 2, 1 and 0 tokens back, and of the bias.
    A program also reads the three tokens after its span, to which its last inputs contribute.
    Grid: see `conv_kernel`.
    """
    first, batch = tl.program_id(1) * SPAN, tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = column < C
    x_ptr += batch * x_batch
    dy_ptr += batch * dy_batch
    dx_ptr += batch * T * C + column
    documents_ptr += batch * T
    taps = _taps(taps_ptr, taps_row, bias_ptr, column, inside)
    end = min(first + SPAN, T)
    x3, x2, x1, _ = _rows(x_ptr, x_token, first - 3, T, column, inside)
    zero = tl.zeros((BC,), tl.float32)
    dx1, dx2, dx3 = zero, zero, zero
    sums = (zero, zero, zero, zero, zero)
    for step in range(0, min(SPAN, T - first) + 3, 4):
        token = first + step
        a, b, c, d = _rows(x_ptr, x_token, token, T, column, inside)
        e, f, g, h = _rows(dy_ptr, dy_token, token, T, column, inside)
        dx1, dx2, dx3, sums = _accumulate(dx_ptr, documents_ptr, token, first, end, T, C, e, a, x1, x2, x3,
                                         dx1, dx2, dx3, sums, taps, inside, HAS_DOCUMENTS)  # fmt: skip
        dx1, dx2, dx3, sums = _accumulate(dx_ptr, documents_ptr, token + 1, first, end, T, C, f, b, a, x1, x2,
                                         dx1, dx2, dx3, sums, taps, inside, HAS_DOCUMENTS)  # fmt: skip
        dx1, dx2, dx3, sums = _accumulate(dx_ptr, documents_ptr, token + 2, first, end, T, C, g, c, b, a, x1,
                                         dx1, dx2, dx3, sums, taps, inside, HAS_DOCUMENTS)  # fmt: skip
        dx1, dx2, dx3, sums = _accumulate(dx_ptr, documents_ptr, token + 3, first, end, T, C, h, d, c, b, a,
                                         dx1, dx2, dx3, sums, taps, inside, HAS_DOCUMENTS)  # fmt: skip
        x3, x2, x1 = b, c, d
    sums_ptr += (batch * tl.num_programs(1) + tl.program_id(1)) * 5 * C + column
    tl.store(sums_ptr, sums[3], mask=inside)
    tl.store(sums_ptr + C, sums[2], mask=inside)
    tl.store(sums_ptr + 2 * C, sums[1], mask=inside)
    tl.store(sums_ptr + 3 * C, sums[0], mask=inside)
    tl.store(sums_ptr + 4 * C, sums[4], mask=inside)


@triton.jit
def _accumulate(dx_ptr, documents_ptr, token, first, end, T, C, dy, x0, x1, x2, x3, dx1, dx2, dx3, sums, taps,
               inside, HAS_DOCUMENTS: tl.constexpr):  # fmt: skip
    """Add one token's share to dx of the inputs up to it; dx of the input 3 tokens back is then complete."""
    x1, x2, x3 = _before(documents_ptr, token, T, x1, x2, x3, HAS_DOCUMENTS)
    z = _sums(x0, x1, x2, x3, taps)
    sigmoid = _sigmoid(z)
    dz = dy * sigmoid * (1.0 + z * (1.0 - sigmoid))
    dz1, dz2, dz3 = _before(documents_ptr, token, T, dz, dz, dz, HAS_DOCUMENTS)
    done = token - 3
    dx = (dx3 + taps[3] * dz3).to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + done.to(tl.int64) * C, dx, mask=inside & (done >= first) & (done < end))
    inside_span = tl.where(token < end, dz, 0.0)  # later tokens belong to another program
    sums = (
        sums[0] + inside_span * x0,
        sums[1] + inside_span * x1,
        sums[2] + inside_span * x2,
        sums[3] + inside_span * x3,
        sums[4] + inside_span,
    )
    return taps[0] * dz, dx1 + taps[1] * dz1, dx2 + taps[2] * dz2, sums


def forward(x: Tensor, taps: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
    """SiLU of the convolution, [B, T, C] in x's dtype, contiguous.

    x: [B, T, C] and taps: fp32 [4, C], earliest token first, with unit stride along C; bias: fp32 [C];
    documents: int32 [B, T], contiguous, or None.
    """
    y = x.new_empty(x.shape)
    grid, options = _grid(x, _SPANS[0]), _options(documents, _SPANS[0])
    conv_kernel[grid](*_arguments(x, taps, bias, documents), y, *x.shape[1:], **options)
    return y


def backward(
    dy: Tensor, x: Tensor, taps: Tensor, bias: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx in x's dtype, dtaps and dbias in fp32; all contiguous. Arguments: see `forward`; dy as x."""
    dx = x.new_empty(x.shape)
    grid = _grid(x, _SPANS[1])
    parts = grid[2] * grid[1], len(taps) + 1, x.shape[2]
    sums = torch.empty(parts, dtype=torch.float32, device=x.device)
    conv_backward_kernel[grid](
        dy,
        *dy.stride()[:2],
        *_arguments(x, taps, bias, documents),
        dx,
        sums,
        *x.shape[1:],
        **_options(documents, _SPANS[1]),
    )
    total = sums.sum(0)
    return dx, total[:-1], total[-1].clone()


def _grid(x: Tensor, span: int) -> tuple[int, int, int]:
    batch, length, channels = x.shape
    return -(-channels // _CHANNELS), -(-length // span), batch


def _arguments(x: Tensor, taps: Tensor, bias: Tensor, documents: Tensor | None) -> tuple[object, ...]:
    return x, *x.stride()[:2], taps, taps.stride(0), bias, bias if documents is None else documents


def _options(documents: Tensor | None, span: int) -> dict[str, int | bool]:
    return {"HAS_DOCUMENTS": documents is not None, "SPAN": span, "BC": _CHANNELS, "num_warps": _WARPS}
