"""Recipe state of a model: the amax history and layouts of its layers, and their effect on this step."""

from collections.abc import Sequence

import torch

from fourbits.linear.adaptive_layout import adapts, measured_at, resolved
from fourbits.linear.amax_policy import (
    ALL_BLOCKS,
    ALL_SATURATED,
    BLOCKS,
    COUNT,
    HISTORY,
    IN_USE,
    LAYOUT,
    LAYOUT_ALL,
    LAYOUT_OTHER,
    LENGTH,
    OPERANDS,
    PENDING,
    SATURATED,
    Reduce,
    committed,
    discarded,
    empty,
    in_use,
    policy_of,
    reduced,
)
from fourbits.recipe.recipe import GemmTable

_WEIGHT = OPERANDS.index("fprop.rhs")


def depends_on_past_steps(table: GemmTable) -> bool:
    """Whether any operand has an amax policy or an adaptive layout."""
    return adapts(table) or any(table.operand(role).amax_policy != "current" for role in OPERANDS)


class RecipeState:
    """Recipe state of the layers with these tables. A layer's index in the list is its slot.

    shared: slots of layers whose weights are quantized with the largest of their amaxes.
    """

    @torch.inference_mode(mode=False)
    def __init__(self, tables: Sequence[GemmTable], shared: Sequence[Sequence[int]] = ()):
        self.tables = tuple(tables)
        self.shared = tuple(tuple(slots) for slots in shared)
        #: as in amax_policy.py: fp64 [layers, 6, 4], fp32 [layers, 6, 2 + L], int64 [layers, 6, 8]
        policies = [policy_of(table) for table in tables]
        self.policy = torch.tensor(policies, dtype=torch.float64, device="cpu")
        self.amaxes, self.counters = empty(self.policy)
        #: the step that observations belong to; None before the first set_step
        self.step: int | None = None
        #: by slot: the effective table, and the operands whose statistics this step records (`measured_at`)
        self.effective = tuple(resolved(table, [0] * len(OPERANDS)).to_text() for table in tables)
        self.measured = ("",) * len(self.tables)

    def replace_table(self, slot: int, table: GemmTable) -> None:
        """Give a layer a table with the same operands, policies and layouts."""
        tables, effective = list(self.tables), list(self.effective)
        choices = [0] * len(OPERANDS)
        tables[slot], effective[slot] = table, resolved(table, choices).to_text()
        self.tables, self.effective = tuple(tables), tuple(effective)

    def take(
        self,
        other: "RecipeState",
        other_slot: int,
        slot: int,
        role: int,
        other_role: int,
        amax: bool,
        layout: bool,
    ) -> None:
        """Copy what another state has tracked of an operand: its newest amaxes, its layout.

        `begin` then sets the ones that a step uses.
        """
        if amax:
            kept = min(int(self.policy[slot, role, LENGTH]), other.amaxes.shape[-1] - HISTORY)
            self.amaxes[slot, role, PENDING] = other.amaxes[other_slot, other_role, PENDING]
            history = slice(HISTORY, HISTORY + kept)
            self.amaxes[slot, role, history] = other.amaxes[other_slot, other_role, history]
            for field in (ALL_SATURATED, ALL_BLOCKS, SATURATED, BLOCKS):
                self.counters[slot, role, field] = other.counters[other_slot, other_role, field]
            self.counters[slot, role, COUNT] = other.counters[other_slot, other_role, COUNT].clamp_max(kept)
        if layout:
            for field in (LAYOUT, LAYOUT_ALL, LAYOUT_OTHER):
                self.counters[slot, role, field] = other.counters[other_slot, other_role, field]

    def to(self, device: torch.device) -> "RecipeState":
        """This state, with its tensors moved to the layers' device."""
        if self.amaxes.device != device and device.type != "meta":
            with torch.inference_mode(False):  # training will write them
                self.amaxes, self.counters = self.amaxes.to(device), self.counters.to(device)
                self.policy = self.policy.to(device)
        return self

    @torch.inference_mode(mode=False)  # training will write to tensors that an earlier evaluation has created
    def advance(self, step: int, reduce: Reduce | None) -> None:
        """Go to an optimizer step: commit the observations of an earlier step, discard those of a later one.

        New tensors replace the old ones, so that a pending backward pass uses the same values as its forward.
        Raises ValueError on several ranks without `reduce`, where each would use a different maximum.
        """
        if step == self.step:
            return
        if self.step is None or step < self.step:
            self.amaxes, self.counters = discarded(self.amaxes, self.counters)
        else:
            amaxes, counters = reduced(self.amaxes, self.counters, reduce)
            self.amaxes, self.counters = committed(amaxes, counters, self.policy)
        self.begin(step)

    @torch.inference_mode(mode=False)
    def begin(self, step: int | None) -> None:
        """Set the amaxes and layouts that a step uses, from the current state. None: before any step."""
        chosen = self.step is None or step is None or any(self.measured)  # else no device-to-host copy
        self.step = step
        self.amaxes[..., IN_USE] = in_use(self.amaxes, self.policy, step or 0)
        for slots in self.shared:
            used = self.amaxes[list(slots), _WEIGHT, IN_USE]
            known = used.amin() >= 0  # else each layer measures its own
            self.amaxes[list(slots), _WEIGHT, IN_USE] = torch.where(known, used.amax(), used)
        if chosen and any(adapts(table) for table in self.tables):
            choices = self.counters[..., LAYOUT].tolist()
            self.effective = tuple(
                resolved(table, choice).to_text() for table, choice in zip(self.tables, choices, strict=True)
            )
        self.measured = tuple("" if step is None else measured_at(table, step) for table in self.tables)

    def adapts(self, slot: int) -> bool:
        """Whether the layer has an adaptive layout."""
        return adapts(self.tables[slot])

    def shares(self, slot: int) -> bool:
        """Whether the layer's weight shares its amax with others."""
        return any(slot in slots for slots in self.shared)
