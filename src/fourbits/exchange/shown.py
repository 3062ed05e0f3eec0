"""Formats values for error messages: short, on one line."""

from collections.abc import Sequence

LONGEST = 80


def shown(value: object) -> str:
    """repr(value) on one line; the middle of a long one is cut."""
    text = repr(value).replace("\n", " ")
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]}...{text[-half:]}"


def not_parameters(names: Sequence[str]) -> str:
    """A sentence that says that these names are not parameters of the model; it shows the first one."""
    rest = f"and {len(names) - 1} more are not parameters" if len(names) > 1 else "is not a parameter"
    return f"{shown(names[0])} {rest} of this model."
