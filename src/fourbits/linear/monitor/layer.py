"""A sample of one layer's operands and GEMMs, taken while a training step runs, without changing its bits."""

from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.linear.dominant_tokens import lost_blocks_and_large_rows
from fourbits.linear.layer_state import TappedCall
from fourbits.linear.monitor.operand import (
    STATS,
    Sample,
    part_of,
    rotation_of,
    rows_of_sample,
    sampled,
    whole_amax,
)
from fourbits.linear.sr_counter import operand_key
from fourbits.quant.correction import correction_of, split_residual
from fourbits.quant.cpu.compiled import uncompiled_quantizers
from fourbits.quant.operand import OperandSpec
from fourbits.quant.request import OPERAND_ROLES
from fourbits.recipe.recipe import GemmTable, table_from_text

GEMMS = ("fprop", "dgrad", "wgrad")
#: axis of the contraction in the tensor (X [M, K], W [N, K] or dY [M, N]) of each operand
_AXES: dict[str, int] = dict(zip(OPERAND_ROLES, (1, 1, 1, 0, 0, 0), strict=True))
#: names of a layer's measurements, in order
FIELDS = (
    *(f"{role}.{stat}" for role in OPERAND_ROLES for stat in STATS),
    *(f"{gemm}.{sum_}" for gemm in GEMMS for sum_ in ("error", "signal")),
    *(f"{tensor}.{share}" for tensor in ("x", "dy") for share in ("lost", "large")),
    *("dw.zeros", "dw.exact_zeros"),
)


class Measured(NamedTuple):
    """Measurements of a layer's first call in a sample: fp32 [FIELDS], NaN where unknown; the element codes
    of a part of W in Fprop.
    """

    values: Tensor
    weight_codes: Tensor | None


class LayerTap:
    """Receives the tensors of a layer's first call after its creation: X and W, later dY."""

    def __init__(self) -> None:
        self.measured: Measured | None = None
        self._call: _Call | None = None
        self._parts: dict[str, Sample] = {}
        self._of_x: Tensor | None = None

    @property
    def waits(self) -> bool:
        """Whether it has seen no call yet."""
        return self._call is None

    @torch.no_grad()
    @uncompiled_quantizers()
    def forward(self, x: Tensor, weight: Tensor, call: TappedCall) -> bool:
        """Sample the operands of X [M, K] and W [N, K]. Returns whether this is the first call."""
        if self._call is not None or not x.numel():
            return False
        self._call = _Call(table_from_text(call.table), *call[1:])
        x, weight = x.detach(), weight.detach()
        tensors = {"fprop.lhs": x, "fprop.rhs": weight, "dgrad.rhs": weight, "wgrad.rhs": x}
        self._parts = {role: self._call.sample(role, tensor) for role, tensor in tensors.items()}
        self._of_x = lost_blocks_and_large_rows(x)
        return True

    @torch.no_grad()
    @uncompiled_quantizers()
    def backward(self, dy: Tensor) -> None:
        """Sample the operands of dY [M, N], and finish."""
        assert self._call is not None
        self._parts |= {role: self._call.sample(role, dy.detach()) for role in ("dgrad.lhs", "wgrad.lhs")}
        self._finish(lost_blocks_and_large_rows(dy))

    @torch.no_grad()
    def finish(self) -> None:
        """End the sample, after a forward pass alone, too."""
        if self._call is not None and self.measured is None:
            self._finish(None)

    def _finish(self, of_dy: Tensor | None) -> None:
        assert self._call is not None
        assert self._of_x is not None
        parts, table, unknown = self._parts, self._call.table, self._of_x.new_full((2,), torch.nan)
        nothing = unknown[:1].expand(len(STATS))
        values = [parts[role].stats if role in parts else nothing for role in OPERAND_ROLES]
        zeros = unknown
        for gemm in GEMMS:
            lhs, rhs = parts.get(f"{gemm}.lhs"), parts.get(f"{gemm}.rhs")
            if lhs is None or rhs is None or getattr(table, gemm).high_precision:
                values.append(unknown)
                continue
            exact, found = lhs.exact @ rhs.exact.t(), lhs.found @ rhs.found.t()
            values.append(torch.stack(((found - exact).square().sum(), exact.square().sum())))
            if gemm == "wgrad":
                zeros = torch.stack([(each == 0).float().mean() for each in (found, exact)])
        values += [self._of_x, unknown if of_dy is None else of_dy, zeros]
        quantized = table.fprop.rhs.block_format.quantized
        self.measured = Measured(torch.cat(values), parts["fprop.rhs"].codes if quantized else None)
        self._parts.clear()


class _Call(NamedTuple):
    """Everything that the samples of one call depend on, apart from its tensors."""

    table: GemmTable
    counter: Tensor
    amax: Tensor | None
    layer: int
    coefficients: Tensor | None

    def sample(self, role: str, x: Tensor) -> Sample:
        """A sample of a role's operand, from X, W or dY."""
        spec, axis, key = (
            self.table.operand(role),
            _AXES[role],
            operand_key(self.counter.to(x.device), role, self.layer),
        )
        if spec.correction:
            x = split_residual(correction_of(spec.correction), x)[0]
            spec = spec.of_residual
        rotation = rotation_of(spec, key)
        part = part_of(x, rows_of_sample(x.shape[1 - axis], spec), 1 - axis)
        if spec.source != "forward":
            amax = self._amax(role, whole_amax(x, spec, axis, rotation), spec)
            coefficients = self.coefficients if spec.error_feedback else None
            return sampled(part, spec, axis, amax, key, rotation, coefficients=coefficients)
        # the values of Fprop's operand are quantized again, contracted over the other axis
        first = self.table.operand("fprop.rhs" if role == "dgrad.rhs" else "fprop.lhs")
        of_first = rotation_of(first, key)
        amax = whole_amax(x, first, 1 - axis, of_first)
        forward = sampled(part, first, 1 - axis, amax, key, of_first).found
        return sampled(part, spec, axis, None, key, rotation, quantized_from=forward.contiguous())

    def _amax(self, role: str, own: Tensor | None, spec: OperandSpec) -> Tensor | None:
        """The operand's amax in the call: what an amax policy gave, or the whole tensor's own."""
        if own is None or self.amax is None or spec.amax_policy == "current":
            return own
        shared = role == "dgrad.rhs" and self.table.shares_weight
        given = self.amax[OPERAND_ROLES.index("fprop.rhs" if shared else role)]
        return torch.where(given >= 0, given, own)
