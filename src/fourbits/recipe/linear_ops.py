"""The arithmetic of a quantized linear as two operators: forward, and backward of both inputs.

Operators are opaque to torch.compile, so a model around them compiles without breaks, and one compiled graph
serves every recipe: the table travels as text. docs/nvfp4.md, section 2.
"""

import functools

import torch
from torch import Tensor

from fourbits.gemm.matmul import matmul_exact
from fourbits.quant.operand import OperandSpec
from fourbits.quant.philox import ROLES
from fourbits.quant.quantize import exact_operand
from fourbits.quant.tensor import ExactOperand
from fourbits.recipe.recipe import GemmSpec, table_from_text

#: what the random bits of a layer depend on at run time; int64 [5], see `new_clock`
CLOCK_FIELDS = ("seed", "step", "first_token", "first_token / 16", "zero")
_SEED, _STEP, _TOKEN, _TOKEN_BLOCK, _ZERO = range(5)
#: for each role, which clock fields are (seed, stream, step, first row, first block) of its sr_key
_TOKENS_ARE_ROWS = (_SEED, _ZERO, _STEP, _TOKEN, _ZERO)
_TOKENS_ARE_SUMMED = (_SEED, _ZERO, _STEP, _ZERO, _TOKEN_BLOCK)
_NO_TOKENS = (_SEED, _ZERO, _STEP, _ZERO, _ZERO)
_KEY_FIELDS = {
    "fprop.lhs": _TOKENS_ARE_ROWS,
    "fprop.rhs": _NO_TOKENS,
    "dgrad.lhs": _TOKENS_ARE_ROWS,
    "dgrad.rhs": _NO_TOKENS,
    "wgrad.lhs": _TOKENS_ARE_SUMMED,
    "wgrad.rhs": _TOKENS_ARE_SUMMED,
}


def new_clock(seed: int, step: int, first_token: int, device: torch.device | str = "cpu") -> Tensor:
    """The clock of one micro-batch: int64 [5], CLOCK_FIELDS."""
    return torch.tensor([seed, step, first_token, first_token // 16, 0], dtype=torch.int64, device=device)


@torch.library.custom_op("fourbits::linear_forward", mutates_args=())
def linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, clock: Tensor, layer: int, table: str, keep_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y = x W^T + bias. x: [M, K] -> y [M, N] in x's dtype, W's exact values and their scale.

    The last two are what Dgrad multiplies when keep_weight is set and the table shares the codes; else empty.
    """
    specs = table_from_text(table)
    with torch.autocast(x.device.type, enabled=False):
        lhs = _operand(x, specs.fprop.lhs, 1, clock, layer, "fprop.lhs")
        rhs = _operand(weight, specs.fprop.rhs, 1, clock, layer, "fprop.rhs")
        y = matmul_exact(lhs, rhs, x.dtype, bias)
    if keep_weight and specs.shares_weight:
        return y, rhs.values, rhs.scale.clone()
    return y, x.new_empty(0), x.new_empty(0)


@linear_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, clock: Tensor, layer: int, table: str, keep_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    specs = table_from_text(table)
    y = x.new_empty((x.shape[0], weight.shape[0]))
    if not (keep_weight and specs.shares_weight):
        return y, x.new_empty(0), x.new_empty(0)
    spec = specs.fprop.rhs
    values = weight.new_empty(
        (weight.shape[0], -(-weight.shape[1] // 16) * 16), dtype=spec.block_format.dtype or torch.bfloat16
    )
    return y, values, weight.new_empty(_scale_shape(spec, values.shape), dtype=torch.float32)


@torch.library.custom_op("fourbits::linear_backward", mutates_args=())
def linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    w_values: Tensor,
    w_scale: Tensor,
    clock: Tensor,
    layer: int,
    table: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """dX [M, K], dW [N, K], dbias [N] in the dtypes of x, weight and weight.

    dy: [M, N]; w_values, w_scale: as returned by the forward; needs: which of x, weight and bias want a
    gradient. The others get an empty tensor.
    """
    specs = table_from_text(table)
    dx = dw = dbias = None
    with torch.autocast(dy.device.type, enabled=False):
        if needs[0]:
            lhs = _operand(dy, specs.dgrad.lhs, 1, clock, layer, "dgrad.lhs")
            if specs.shares_weight and w_values.numel():
                rhs = ExactOperand(w_values, w_scale, 1, specs.fprop.rhs).along(0)
            else:
                rhs = _operand(weight, specs.dgrad.rhs, 0, clock, layer, "dgrad.rhs")
            dx = matmul_exact(lhs, rhs, x.dtype)[:, : x.shape[1]].contiguous()
        if needs[1]:
            dw = _wgrad(dy, x, specs.wgrad, clock, layer, weight.dtype)
        if needs[2]:
            dbias = dy.sum(0, dtype=torch.float32).to(weight.dtype)
    return tuple(dy.new_empty(0) if grad is None else grad for grad in (dx, dw, dbias))  # type: ignore[return-value]


@linear_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    w_values: Tensor,
    w_scale: Tensor,
    clock: Tensor,
    layer: int,
    table: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else dy.new_empty(0),
        torch.empty_like(weight, memory_format=torch.contiguous_format) if needs[1] else dy.new_empty(0),
        weight.new_empty(weight.shape[0]) if needs[2] else dy.new_empty(0),
    )


def _wgrad(dy: Tensor, x: Tensor, spec: GemmSpec, clock: Tensor, layer: int, dtype: torch.dtype) -> Tensor:
    lhs = _operand(dy, spec.lhs, 0, clock, layer, "wgrad.lhs")
    rhs = _operand(x, spec.rhs, 0, clock, layer, "wgrad.rhs")
    return matmul_exact(lhs, rhs, dtype)


def _operand(x: Tensor, spec: OperandSpec, axis: int, clock: Tensor, layer: int, role: str) -> ExactOperand:
    needs_key = spec.stochastic or (spec.rht and spec.signs in ("per-layer", "per-call"))
    return exact_operand(x, spec, axis, sr_key=_sr_key(clock, layer, role) if needs_key else None)


def _sr_key(clock: Tensor, layer: int, role: str) -> Tensor:
    """(seed, stream, step, first row, first block) of one operand; int64 [5] on the clock's device."""
    fields, stream = _key_parts(layer, role, clock.device)
    return clock[fields] + stream


@functools.lru_cache(maxsize=8192)
def _key_parts(layer: int, role: str, device: torch.device) -> tuple[Tensor, Tensor]:
    fields = torch.tensor(_KEY_FIELDS[role], device=device)
    stream = torch.tensor([0, layer * 8 + ROLES.index(role), 0, 0, 0], dtype=torch.int64, device=device)
    return fields, stream


def _scale_shape(spec: OperandSpec, shape: torch.Size) -> tuple[int, ...]:
    """Shape of the scale of an exact operand kept along axis 1."""
    fmt = spec.block_format
    if fmt.outer_block:
        return (shape[0], -(-shape[1] // fmt.outer_block))
    if fmt.scale != "fp32" or spec.block_size is None:
        return ()
    return (-(-shape[0] // spec.block_size[0]), -(-shape[1] // spec.block_size[1]))
