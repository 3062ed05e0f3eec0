"""The operands of one call of a linear: each role's spec, random bits and amax, and who quantizes.

On NVIDIA cards the fused kernels do, both operands of a gradient from one read; elsewhere the reference's
source.
"""

import functools
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fourbits.linear.sr_counter import KEY_FIELDS, OPERANDS, draws, key_parts
from fourbits.quant.amax_stats import layout_counts, own_amax
from fourbits.quant.kernels.kernel_config import FP8_FORMATS, NoiseKey
from fourbits.quant.kernels.launch_exact import fused_observed, fused_operands
from fourbits.quant.kernels.launch_packed import (
    fused_kept_packed,
    fused_quantize,
    fused_unpacked,
    why_not_kept_packed,
    why_not_unpacked,
)
from fourbits.quant.kernels.support import Wanted, why_not_fused
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import exact_operand, quantize
from fourbits.quant.reference.philox import ROLES
from fourbits.quant.tensor import ExactOperand, QuantizedTensor, unpacked
from fourbits.recipe.recipe import GemmTable


@dataclass(slots=True)
class Call:
    """One call of an operator: what its operands depend on, and what they turned out to be."""

    table: GemmTable
    clock: Tensor
    layer: int
    amax: Tensor | None
    #: operands whose layout's statistics are taken, as by layout.measured_at
    measured: str = ""
    #: what `observed` gives of all roles, once one is noted; role -> counts of the layout's statistics
    notes: tuple[Tensor, Tensor] | None = None
    layouts: dict[str, Tensor] = field(default_factory=dict)

    def operand(self, x: Tensor, axis: int, role: str) -> ExactOperand:
        """x as the operand of this role."""
        return self.operands(x, (role, axis))[0]

    def operands(self, x: Tensor, *sides: tuple[str, int]) -> tuple[ExactOperand, ...]:
        """x as the operands of these (role, axis), from one read where the kernels make them so."""
        for role, axis in sides:
            if role in self.measured:
                kind = self.measured.partition(f"{role}:")[2].partition(",")[0]
                spec = self.table.operand(role)
                self.layouts[role] = layout_counts(x, spec, axis, kind, self._sr_key(role))
        if self._one_read(x, sides):
            return self._fused(x, sides)
        return tuple(
            self._fused(x, (side,))[0] if self._one_read(x, (side,)) else self._reference(x, *side)
            for side in sides
        )

    def multiplicand(self, x: Tensor, axis: int, role: str) -> ExactOperand | QuantizedTensor:
        """x as the operand of this role, in the form that whoever multiplies it takes."""
        return self.packed(x, axis, role) if self.is_native(role) else self.operand(x, axis, role)

    def is_native(self, role: str) -> bool:
        """Whether FP4 tensor cores multiply the GEMM of this role."""
        return role.partition(".")[0] in self.table.native

    def packed(self, x: Tensor, axis: int, role: str) -> QuantizedTensor:
        """x as the operand of this role in codes and scales; for roles without a policy."""
        wanted = self._wanted(axis, role)
        if _is_fused(x, (wanted,)):
            return fused_quantize(x, (wanted,))[0]
        return quantize(x, wanted.spec, axis, sr_key=self._sr_key(role))

    def with_packed_input(self, x: Tensor) -> tuple[ExactOperand | QuantizedTensor, QuantizedTensor]:
        """X as Fprop multiplies it, and in codes and scales as Wgrad will; for roles without a policy."""
        if self.one_read_of_packed_input(x):
            return fused_kept_packed(x, self._wanted(1, "fprop.lhs"), self._wanted(0, "wgrad.rhs"))
        return self.multiplicand(x, 1, "fprop.lhs"), self.packed(x, 0, "wgrad.rhs")

    def one_read_of_packed_input(self, x: Tensor) -> bool:
        """Whether one read makes X as Fprop multiplies it and, packed, as Wgrad does."""
        wanted = self._wanted(1, "fprop.lhs"), self._wanted(0, "wgrad.rhs")
        if self._has_policy("fprop.lhs") or self._has_policy("wgrad.rhs"):
            return False
        return self.one_read_of_input(x) and why_not_kept_packed(x, *wanted) is None

    def one_read_of_input(self, x: Tensor) -> bool:
        """Whether one read makes X as Fprop and as Wgrad multiply it."""
        if self.table.wgrad.rhs.source == "forward":
            return False
        if self.is_native("fprop.lhs") or self.is_native("wgrad.rhs"):
            return False
        return self._one_read(x, (("fprop.lhs", 1), ("wgrad.rhs", 0)))

    def depends_on_the_call(self, *roles: str) -> bool:
        """Whether operands of these roles depend on more than the tensor, or tell something about it."""
        return any(
            role in self.measured or self._has_policy(role) or draws(self.table.operand(role))
            for role in roles
        )

    def _one_read(self, x: Tensor, sides: tuple[tuple[str, int], ...]) -> bool:
        wanted = tuple(self._wanted(axis, role) for role, axis in sides)
        policies = any(self._has_policy(role) for role, _ in sides)
        if policies and len(sides) > 1 and not all(want.spec.tensor_scaled for want in wanted):
            return False
        return _is_fused(x, wanted)

    def _fused(self, x: Tensor, sides: tuple[tuple[str, int], ...]) -> tuple[ExactOperand, ...]:
        wanted = [self._wanted(axis, role) for role, axis in sides]
        if not any(self._has_policy(role) for role, _ in sides):
            return fused_operands(x, wanted)
        places = [ROLES.index(role) for role, _ in sides]
        made = fused_observed(x, wanted, self._notes(), places)
        for role, _ in sides:
            self._keep_what_is_used(role)
        return made

    def _reference(self, x: Tensor, role: str, axis: int) -> ExactOperand:
        spec, key = self.table.operand(role), self._sr_key(role)
        if not self._has_policy(role):
            return exact_operand(x, spec, axis, sr_key=key)
        used, own, counts = own_amax(x, spec, axis, self._given(role), key)
        all_own, all_counts = self._notes()
        place = ROLES.index(role)
        all_own[place], all_counts[place, :2] = own, counts
        self._keep_what_is_used(role)
        return exact_operand(x, spec, axis, amax=used, sr_key=key)

    def _notes(self) -> tuple[Tensor, Tensor]:
        """Own amaxes fp32 [6] and counts int64 [6, 4] of all roles, which operands write."""
        if self.notes is None:
            self.notes = nothing_observed(self.clock, self.amax, len(OPERANDS))
        return self.notes

    def _keep_what_is_used(self, role: str) -> None:
        """Forget an own amax that nobody needs: of an operand without a policy, and between intervals."""
        policy = self.table.operand(role).amax_policy
        if policy in ("delayed", "history"):
            return
        own, counts = self._notes()
        place = ROLES.index(role)
        if policy == "interval":
            own[place] = torch.where(self._given(role) < 0, own[place], -1.0)
        else:
            own[place], counts[place] = -1.0, 0

    def _has_policy(self, role: str) -> bool:
        return self.amax is not None and self.table.operand(role).amax_policy != "current"

    def _given(self, role: str) -> Tensor:
        assert self.amax is not None
        return self.amax[ROLES.index(role)]

    def observed(self, roles: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """(own amaxes fp32 [n], counts int64 [n, 4]) of these neighbouring roles; empty without amax."""
        if self.amax is None:
            return nothing_observed(self.clock, self.amax, len(roles))
        own, counts = self._notes()
        for role, layout in self.layouts.items():
            counts[ROLES.index(role), 2:] = layout
        first = ROLES.index(roles[0])
        return own[first : first + len(roles)], counts[first : first + len(roles)]

    def _wanted(self, axis: int, role: str) -> Wanted:
        spec, key = self.table.operand(role), None
        if draws(spec):
            key = NoiseKey(self.clock, KEY_FIELDS[role], self.layer * 8 + ROLES.index(role))
        return Wanted(spec, axis, key, stored=self._given(role) if self._has_policy(role) else None)

    def _sr_key(self, role: str) -> Tensor | None:
        """(seed, stream, step, first row, first block) of one operand, int64 [5]; None if none is drawn."""
        if not draws(self.table.operand(role)):
            return None
        fields, stream = key_parts(self.layer, role, self.clock.device)
        return self.clock[fields] + stream


def nothing_observed(clock: Tensor, amax: Tensor | None, roles: int) -> tuple[Tensor, Tensor]:
    """Negative amaxes and zero counts for that many roles; empty without amax."""
    own = clock.new_full((0 if amax is None else roles,), -1.0, dtype=torch.float32)
    return own, clock.new_zeros((own.shape[0], 4))


def values_dtype(spec: OperandSpec, device: torch.device) -> torch.dtype:
    """dtype of an exact operand's values on a device: FP8 stays FP8 where tensor cores multiply it."""
    fmt = spec.block_format
    if device.type == "cuda" and spec.format in FP8_FORMATS and fmt.element is not None and fmt.element.dtype:
        probe = torch.empty((0, 0), device=device)
        if why_not_fused(probe, (Wanted(spec, 1),)) is None:
            return fmt.element.dtype
    return fmt.dtype or torch.bfloat16


def unpacked_operand(q: QuantizedTensor) -> ExactOperand:
    """The exact form of a packed operand, by the fused kernel where there is one."""
    if not q.codes.is_cuda:
        return unpacked(q)
    if reason := why_not_unpacked(q):
        _announce(reason)
        return unpacked(q)
    return fused_unpacked(q)


def _is_fused(x: Tensor, wanted: tuple[Wanted, ...]) -> bool:
    """Whether the fused kernels make these operands; says once why not, where x is on an accelerator."""
    if x.device.type in ("cpu", "meta") or not all(want.spec.block_format.quantized for want in wanted):
        return False
    reason = why_not_fused(x, wanted)
    if reason is not None and len(wanted) == 1:
        _announce(f"{wanted[0].spec.format}: {reason}")
    return reason is None


@functools.cache
def _announce(reason: str) -> None:
    warnings.warn(
        f"fourbits: the eager reference quantizes on this GPU, many times slower, same bits ({reason}).",
        stacklevel=4,
    )
