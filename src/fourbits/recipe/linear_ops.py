"""The arithmetic of a quantized linear as two operators: forward, and backward of both inputs.

Operators are opaque to torch.compile, so a model around them compiles without breaks, and one compiled graph
serves every recipe: the table travels as text. docs/nvfp4.md, section 2.
"""

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fourbits.gemm.matmul import matmul_exact
from fourbits.quant.operand import OperandSpec
from fourbits.quant.own_amax import own_amax
from fourbits.quant.philox import ROLES
from fourbits.quant.quantize import exact_operand
from fourbits.quant.tensor import ExactOperand, spread
from fourbits.recipe.recipe import GemmTable, table_from_text

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
#: roles of the operands that each operator makes, in order
_FORWARD, _BACKWARD = ROLES[:2], ROLES[2:6]


def new_clock(seed: int, step: int, first_token: int, device: torch.device | str = "cpu") -> Tensor:
    """The clock of one micro-batch: int64 [5], CLOCK_FIELDS."""
    return torch.tensor([seed, step, first_token, first_token // 16, 0], dtype=torch.int64, device=device)


@torch.library.custom_op("fourbits::linear_forward", mutates_args=())
def linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    clock: Tensor,
    amax: Tensor | None,
    layer: int,
    table: str,
    keep_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y = x W^T + bias, [M, N] in x's dtype; W's exact values and scale; own amaxes and counts of X and W.

    x: [M, K]; amax: fp32 [6], what operands with an amax policy use (negative: their own), None where none
    has one. W's values are kept when keep_weight is set and Dgrad starts from them, else empty. Own amaxes,
    fp32 [2], and counts, int64 [2, 2], are as `own_amax` gives them: NaN and 0 for an operand without a
    policy, empty without amax.
    """
    call = _Call(table_from_text(table), clock, layer, amax)
    with torch.autocast(x.device.type, enabled=False):
        lhs = call.operand(x, 1, "fprop.lhs")
        rhs = call.operand(weight, 1, "fprop.rhs")
        y = matmul_exact(lhs, rhs, x.dtype, bias)
    own, counts = call.observed(_FORWARD)
    if keep_weight and call.table.keeps_weight:
        return y, rhs.values, rhs.scale.clone(), own, counts
    return y, x.new_empty(0), x.new_empty(0), own, counts


@linear_forward.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    clock: Tensor,
    amax: Tensor | None,
    layer: int,
    table: str,
    keep_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    specs = table_from_text(table)
    y = x.new_empty((x.shape[0], weight.shape[0]))
    own, counts = _nothing_observed(clock, amax, len(_FORWARD))
    if not (keep_weight and specs.keeps_weight):
        return y, x.new_empty(0), x.new_empty(0), own, counts
    spec = specs.fprop.rhs
    values = weight.new_empty(
        (weight.shape[0], -(-weight.shape[1] // 16) * 16), dtype=spec.block_format.dtype or torch.bfloat16
    )
    scale = weight.new_empty(_scale_shape(spec, values.shape), dtype=torch.float32)
    return y, values, scale, own, counts


@torch.library.custom_op("fourbits::linear_backward", mutates_args=())
def linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    w_values: Tensor,
    w_scale: Tensor,
    clock: Tensor,
    amax: Tensor | None,
    layer: int,
    table: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dX [M, K], dW [N, K], dbias [N] in the dtypes of x, weight and weight; own amaxes and counts.

    dy: [M, N]; w_values, w_scale: as returned by the forward; amax: as for the forward; needs: which of x,
    weight and bias want a gradient. The others get an empty tensor. Own amaxes and counts are of Dgrad's and
    Wgrad's operands, as in the forward.
    """
    call = _Call(table_from_text(table), clock, layer, amax)
    dx = dw = dbias = None
    with torch.autocast(dy.device.type, enabled=False):
        if needs[0]:
            lhs = call.operand(dy, 1, "dgrad.lhs")
            rhs = _dgrad_weight(call, weight, ExactOperand(w_values, w_scale, 1, call.table.fprop.rhs))
            dx = matmul_exact(lhs, rhs, x.dtype)[:, : x.shape[1]].contiguous()
        if needs[1]:
            lhs, rhs = call.operand(dy, 0, "wgrad.lhs"), _wgrad_input(call, x)
            dw = matmul_exact(lhs, rhs, weight.dtype)
        if needs[2]:
            dbias = dy.sum(0, dtype=torch.float32).to(weight.dtype)
    dx, dw, dbias = (dy.new_empty(0) if grad is None else grad for grad in (dx, dw, dbias))
    return (dx, dw, dbias, *call.observed(_BACKWARD))


@linear_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    w_values: Tensor,
    w_scale: Tensor,
    clock: Tensor,
    amax: Tensor | None,
    layer: int,
    table: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else dy.new_empty(0),
        torch.empty_like(weight, memory_format=torch.contiguous_format) if needs[1] else dy.new_empty(0),
        weight.new_empty(weight.shape[0]) if needs[2] else dy.new_empty(0),
        *_nothing_observed(clock, amax, len(_BACKWARD)),
    )


@dataclass(slots=True)
class _Call:
    """One call of an operator: what its operands depend on, and what they turned out to be."""

    table: GemmTable
    clock: Tensor
    layer: int
    amax: Tensor | None
    #: role -> (own amax, counts)
    notes: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def operand(self, x: Tensor, axis: int, role: str) -> ExactOperand:
        """x as the operand of this role."""
        spec = self.table.operand(role)
        needs_key = spec.stochastic or (spec.rht and spec.signs in ("per-layer", "per-call"))
        key = _sr_key(self.clock, self.layer, role) if needs_key else None
        if spec.amax_policy == "current" or self.amax is None:
            return exact_operand(x, spec, axis, sr_key=key)
        given = self.amax[ROLES.index(role)]
        used, own, counts = own_amax(x, spec, axis, given, key)
        if spec.amax_policy == "interval":  # what is not used need not be known
            own = torch.where(given < 0, own, torch.nan)
        self.notes[role] = (own, counts)
        return exact_operand(x, spec, axis, amax=used, sr_key=key)

    def observed(self, roles: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """(own amaxes fp32 [n], counts int64 [n, 2]) of these roles; empty without amax."""
        own, counts = _nothing_observed(self.clock, self.amax, len(roles))
        for index, role in enumerate(roles):
            if role in self.notes:
                own[index], counts[index] = self.notes[role]
        return own, counts


def _nothing_observed(clock: Tensor, amax: Tensor | None, roles: int) -> tuple[Tensor, Tensor]:
    own = clock.new_full((0 if amax is None else roles,), torch.nan, dtype=torch.float32)
    return own, clock.new_zeros((own.shape[0], 2))


def _dgrad_weight(call: _Call, weight: Tensor, kept: ExactOperand) -> ExactOperand:
    """W as Dgrad multiplies it. kept: Fprop's W, where the table keeps it."""
    if call.table.shares_weight:
        return kept.along(0)
    if call.table.dgrad.rhs.source == "forward":
        fprop = kept if call.table.keeps_weight else call.operand(weight, 1, "fprop.rhs")
        weight = _dequantized(fprop, weight.shape[1])
    return call.operand(weight, 0, "dgrad.rhs")


def _wgrad_input(call: _Call, x: Tensor) -> ExactOperand:
    """X as Wgrad multiplies it; from Fprop's copy, it is made once more, which is cheaper than to keep it."""
    if call.table.wgrad.rhs.source == "forward":
        x = _dequantized(call.operand(x, 1, "fprop.lhs"), x.shape[1])
    return call.operand(x, 0, "wgrad.rhs")


def _dequantized(operand: ExactOperand, columns: int) -> Tensor:
    """Values of an operand along axis 1 without its padding, fp32 [R, columns]. docs/nvfp4.md, section 8."""
    scale = operand.scale
    if scale.dim():
        scale = spread(scale, operand.scale_block, operand.values.shape)
    return (operand.values.to(torch.float32) * scale)[:, :columns]


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
    size = spec.outer_size or (spec.block_size if spec.block_format.scale == "fp32" else None)
    return () if size is None else (-(-shape[0] // size[0]), -(-shape[1] // size[1]))
