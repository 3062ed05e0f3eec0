"""Dotted settings of a recipe: a transform that is set on one operand of a GEMM is set on both."""

import re
from collections.abc import Mapping
from typing import Any

_TRANSFORM = re.compile(
    r"(?P<gemm>(?:.*\.)?(?:fprop|dgrad|wgrad)\.)(?P<side>lhs|rhs)\.(?P<field>rht|rht_signs)"
)


def with_both_sides(changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` and, for a transform named for one side only, the same for the other side.

    A transform cancels in a product only if both operands have it, so no other meaning is possible; a value
    given for the other side is kept, and is an error of the GEMM if it differs.
    """
    found = dict(changes)
    for name, value in changes.items():
        if match := _TRANSFORM.fullmatch(name):
            other = "rhs" if match["side"] == "lhs" else "lhs"
            found.setdefault(f"{match['gemm']}{other}.{match['field']}", value)
    return found
