"""The amax stats that a call records, if its recipe has amax policies or adaptive layouts."""

import torch
from torch import Tensor

from fourbits.linear.sr_counter import operand_key
from fourbits.quant.amax_stats import layout_counts
from fourbits.quant.request import OPERAND_ROLES, StatsTarget
from fourbits.recipe.recipe import GemmTable

#: roles of the operands that the forward and the backward may quantize, in order
FORWARD, BACKWARD = OPERAND_ROLES, OPERAND_ROLES[2:]


class Observer:
    """The amaxes that a call uses, and the stats of its operands. docs/nvfp4.md, sections 16 and 17."""

    def __init__(self, table: GemmTable, measured: str, amax: Tensor, counter: Tensor, layer: int) -> None:
        """amax: fp32 [6], the amax of operands with a policy (negative: their own). measured: operands whose
        layout statistics are recorded, as returned by `adaptive_layout.measured_at`.
        """
        self._table, self._measured, self._amax = table, measured, amax
        self._counter, self._layer = counter, layer
        self._own, self._counts = nothing_recorded(amax, len(OPERAND_ROLES))

    def amax(self, role: str) -> Tensor | None:
        """The amax that an operand with a policy uses; None without a policy."""
        if not has_policy(self._table, role):
            return None
        return self._amax[OPERAND_ROLES.index(role)]

    def target(self, roles: tuple[str, ...]) -> StatsTarget | None:
        """Where the quantizer of these operands records stats; None if none has a policy."""
        if not any(has_policy(self._table, role) for role in roles):
            return None
        return StatsTarget(self._own, self._counts, tuple(OPERAND_ROLES.index(role) for role in roles))

    def measure(self, x: Tensor, role: str, axis: int) -> None:
        """Record an operand's layout statistics, if this step records them."""
        if role not in self._measured:
            return
        kind = self._measured.partition(f"{role}:")[2].partition(",")[0]
        spec, place = self._table.operand(role), OPERAND_ROLES.index(role)
        key = operand_key(self._counter, role, self._layer)
        self._counts[place, 2:] = layout_counts(x, spec, axis, kind, key)

    def recorded(self, roles: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """(own amaxes fp32 [n], counts int64 [n, 4]) of consecutive roles, for `amax_policy.observe`."""
        for role in roles:
            self._drop_unneeded(role)
        first = OPERAND_ROLES.index(roles[0])
        return self._own[first : first + len(roles)], self._counts[first : first + len(roles)]

    def _drop_unneeded(self, role: str) -> None:
        """Drop the own amax of an operand without a policy, or between the steps of an interval policy."""
        policy, place = self._table.operand(role).amax_policy, OPERAND_ROLES.index(role)
        if policy == "interval":
            self._own[place] = torch.where(self._amax[place] < 0, self._own[place], -1.0)
        elif policy == "current":
            self._own[place], self._counts[place, :2] = -1.0, 0


def has_policy(table: GemmTable, role: str) -> bool:
    """Whether an operand's amax depends on past steps."""
    return table.operand(role).amax_policy != "current"


def nothing_recorded(amax: Tensor, roles: int) -> tuple[Tensor, Tensor]:
    """Empty stats of `roles` roles: negative amaxes and zero counts."""
    own = amax.new_full((roles,), -1.0)
    return own, torch.zeros((roles, 4), dtype=torch.int64, device=amax.device)
