"""Values in error messages: on one line, and short."""

LONGEST = 80


def shown(value: object) -> str:
    """repr(value), on one line and without the middle of a long one."""
    text = repr(value).replace("\n", " ")
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]}...{text[-half:]}"
