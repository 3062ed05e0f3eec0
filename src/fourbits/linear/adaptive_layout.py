"""Adaptive layouts: the effective table, and which steps record statistics. docs/nvfp4.md, section 17."""

from collections.abc import Sequence
from dataclasses import replace

from fourbits.linear.amax_policy import OPERANDS
from fourbits.quant.operand import OperandSpec
from fourbits.recipe.recipe import GemmSpec, GemmTable


def adapts(table: GemmTable) -> bool:
    """Whether any operand has an adaptive layout."""
    return any(table.operand(role).adaptive != "none" for role in OPERANDS)


def resolved(table: GemmTable, choices: Sequence[int]) -> GemmTable:
    """The table with fixed layouts. choices: per role, 1 for the alternative to the spec's own layout."""
    other = dict(zip(OPERANDS, choices, strict=True))
    if table.shares_weight:
        other["dgrad.rhs"] = other["fprop.rhs"]
    specs = {role: _fixed(table.operand(role), bool(other[role])) for role in OPERANDS}
    return replace(
        table,
        fprop=GemmSpec(lhs=specs["fprop.lhs"], rhs=specs["fprop.rhs"]),
        dgrad=GemmSpec(lhs=specs["dgrad.lhs"], rhs=specs["dgrad.rhs"]),
        wgrad=GemmSpec(lhs=specs["wgrad.lhs"], rhs=specs["wgrad.rhs"]),
    )


def measured_at(table: GemmTable, step: int) -> str:
    """The operands whose statistics this step records: 'role:outer' or 'role:block', comma-separated."""
    found: list[str] = []
    for role in OPERANDS:
        spec = table.operand(role)
        shared = role == "dgrad.rhs" and table.shares_weight
        if spec.adaptive != "none" and not shared and step % spec.adaptive_interval == 0:
            found.append(f"{role}:{spec.adaptive}")
    return ",".join(found)


def _fixed(spec: OperandSpec, other: bool) -> OperandSpec:
    if spec.adaptive == "outer" and other:
        return replace(spec, adaptive="none", format="nvfp4-double")
    if spec.adaptive == "block" and other:
        return replace(spec, adaptive="none", block=(1, 16))
    return replace(spec, adaptive="none")
