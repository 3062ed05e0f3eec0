"""README.md of an exported model. A README that fourbits did not write is never replaced."""

from pathlib import Path

CARD = "README.md"
MARK = "<!-- written by fourbits export; a README.md without this line is never replaced -->"


def may_write_card(folder: Path) -> bool:
    """Whether the folder has no README.md, or one from an export."""
    path = folder / CARD
    return not path.exists() or MARK in path.read_text(encoding="utf-8", errors="replace")
