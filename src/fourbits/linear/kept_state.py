"""The recipe state that a layer keeps when its table changes: histories of amaxes, layouts. Decision R 14."""

from fourbits.linear.amax_history import RecipeState
from fourbits.linear.amax_policy import OPERANDS
from fourbits.quant.operand import OperandSpec


def keep_tracked(old: RecipeState, old_slot: int, new: RecipeState, slot: int) -> None:
    """Copy the tracked state of operands to a new state, where it means the same under the new table."""
    before, after = old.tables[old_slot], new.tables[slot]
    for role, name in enumerate(OPERANDS):
        # a W that both GEMMs read was observed once, as Fprop's
        source = "fprop.rhs" if name == "dgrad.rhs" and before.shares_weight else name
        specs = before.operand(source), after.operand(name)
        place = OPERANDS.index(source)
        new.take(old, old_slot, slot, role, place, amax=_same_amax(*specs), layout=_same_layout(*specs))


def _same_amax(old: OperandSpec, new: OperandSpec) -> bool:
    """Whether both track the amax of the same values, by the same policy."""
    values = [(spec.source, spec.transform, spec.correction) for spec in (old, new)]
    return old.amax_policy == new.amax_policy != "current" and values[0] == values[1]


def _same_layout(old: OperandSpec, new: OperandSpec) -> bool:
    return old.adaptive == new.adaptive != "none"
