"""The code of docs/extending.md, run once per process: what a page shows is what tests use."""

import functools
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def blocks_of(title: str, language: str) -> list[str]:
    """The code blocks of a section, in order."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [part.split("\n```")[0] for part in section.split(f"```{language}\n")[1:]]


@functools.cache
def names_of(title: str) -> dict[str, Any]:
    """What the Python blocks of a section define, after running them."""
    blocks = blocks_of(title, "python")
    assert blocks, f"docs/extending.md, {title}: no Python block"
    names: dict[str, Any] = {"__name__": f"documented[{title}]"}
    for block in blocks:
        exec(compile(block, f"{PAGE.name}: {title}", "exec"), names)
    return names
