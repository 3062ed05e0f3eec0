"""Settings of a recipe, dotted or nested: a transform that is set on one operand of a GEMM is set on both.

It cancels in a product only if both operands have it, so no other meaning is possible; a value given for the
other operand is kept, and is an error of the GEMM if it differs.
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
    """`changes` by dotted names and, for a transform named for one operand only, the same for the other."""
    found = dict(changes)
    for name, value in changes.items():
        if match := _TRANSFORM.fullmatch(name):
            found.setdefault(f"{match['gemm']}{_OTHER[match['side']]}.{match['field']}", value)
    return found


def gemms_with_both_sides(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The same for nested changes to a recipe that has all its operands already."""
    found = dict(changes)
    for name in ("fprop", "dgrad", "wgrad"):
        gemm = found.get(name)
        if isinstance(gemm, Mapping) and all(isinstance(gemm.get(side, {}), Mapping) for side in _OTHER):
            found[name] = {**gemm, **{side: _with_transform_of(gemm, side) for side in _OTHER}}
    return found


def _with_transform_of(gemm: Mapping[str, Any], side: str) -> dict[str, Any]:
    """One operand's changes, and what the other's say of its transform."""
    other = gemm.get(_OTHER[side], {})
    return {**{field: other[field] for field in _FIELDS if field in other}, **gemm.get(side, {})}
