"""Values in error messages: on one line, and short."""

from collections.abc import Sequence

LONGEST = 80


def shown(value: object) -> str:
    """repr(value), on one line and without the middle of a long one."""
    text = repr(value).replace("\n", " ")
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]}...{text[-half:]}"


def not_parameters(names: Sequence[str]) -> str:
    """A sentence: these names, of which it shows the first, are not parameters of the model."""
    rest = f"and {len(names) - 1} more are not parameters" if len(names) > 1 else "is not a parameter"
    return f"{shown(names[0])} {rest} of this model."
