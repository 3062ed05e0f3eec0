"""Overrides of a recipe, dotted or nested: what both operands of a GEMM must share applies to both.

A transform cancels only if both operands have it, and Wgrad's cross terms vanish only if both have the same
correction, so no other meaning is possible. A value given for the other operand is kept, and the recipe
rejects it if it differs.
"""

import re
from collections.abc import Mapping
from typing import Any

_TRANSFORM = ("rht", "rht_signs")
#: GEMM -> the fields that both of its operands share
_SHARED = {"fprop": _TRANSFORM, "dgrad": _TRANSFORM, "wgrad": (*_TRANSFORM, "correction")}
_OTHER = {"lhs": "rhs", "rhs": "lhs"}
_OPERAND = re.compile(
    r"(?P<gemm>(?:.*\.)?(?P<name>fprop|dgrad|wgrad)\.)(?P<side>lhs|rhs)\.(?P<field>\w+)",
)


def with_both_sides(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted `changes`, with a shared field that is set on one operand only copied to the other."""
    found = dict(changes)
    for name, value in changes.items():
        match = _OPERAND.fullmatch(name)
        if match and match["field"] in _SHARED[match["name"]]:
            found.setdefault(f"{match['gemm']}{_OTHER[match['side']]}.{match['field']}", value)
    return found


def gemms_with_both_sides(changes: Mapping[str, Any]) -> dict[str, Any]:
    """As `with_both_sides`, for nested changes to a complete recipe."""
    found = dict(changes)
    for name, fields in _SHARED.items():
        gemm = found.get(name)
        if isinstance(gemm, Mapping) and all(isinstance(gemm.get(side, {}), Mapping) for side in _OTHER):
            found[name] = {**gemm, **{side: _with_shared(gemm, side, fields) for side in _OTHER}}
    return found


def _with_shared(gemm: Mapping[str, Any], side: str, fields: tuple[str, ...]) -> dict[str, Any]:
    """One operand's changes, plus the shared fields set in the other's."""
    other = gemm.get(_OTHER[side], {})
    return {**{field: other[field] for field in fields if field in other}, **gemm.get(side, {})}
