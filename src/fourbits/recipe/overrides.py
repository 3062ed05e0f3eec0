"""Overrides of a recipe, dotted or nested: a transform set on one operand of a GEMM applies to both.

A transform cancels only if both operands have it, so no other meaning is possible. A value given for the
other operand is kept, and GemmSpec rejects it if it differs.
"""

import re
from collections.abc import Mapping
from typing import Any

_FIELDS = ("rht", "rht_signs")
_OTHER = {"lhs": "rhs", "rhs": "lhs"}
_TRANSFORM = re.compile(
    rf"(?P<gemm>(?:.*\.)?(?:fprop|dgrad|wgrad)\.)(?P<side>lhs|rhs)\.(?P<field>{'|'.join(_FIELDS)})"
)


def with_both_sides(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted `changes`, with a transform that is set on one operand only copied to the other."""
    found = dict(changes)
    for name, value in changes.items():
        if match := _TRANSFORM.fullmatch(name):
            found.setdefault(f"{match['gemm']}{_OTHER[match['side']]}.{match['field']}", value)
    return found


def gemms_with_both_sides(changes: Mapping[str, Any]) -> dict[str, Any]:
    """As `with_both_sides`, for nested changes to a complete recipe."""
    found = dict(changes)
    for name in ("fprop", "dgrad", "wgrad"):
        gemm = found.get(name)
        if isinstance(gemm, Mapping) and all(isinstance(gemm.get(side, {}), Mapping) for side in _OTHER):
            found[name] = {**gemm, **{side: _with_transform_of(gemm, side) for side in _OTHER}}
    return found


def _with_transform_of(gemm: Mapping[str, Any], side: str) -> dict[str, Any]:
    """One operand's changes, plus the transform set in the other's."""
    other = gemm.get(_OTHER[side], {})
    return {**{field: other[field] for field in _FIELDS if field in other}, **gemm.get(side, {})}
