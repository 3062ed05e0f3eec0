"""The code of a page in docs/: what it shows is what tests use."""

import functools
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "extending.md"


def blocks_of(title: str, language: str, page: Path = PAGE) -> list[str]:
    """The code blocks of a section, in order."""
    section = page.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [part.split("\n```")[0] for part in section.split(f"```{language}\n")[1:]]


@functools.cache
def names_of(title: str, page: Path = PAGE) -> dict[str, Any]:
    """What the Python blocks of a section define, after running them once per process."""
    blocks = blocks_of(title, "python", page)
    assert blocks, f"docs/{page.name}, {title}: no Python block"
    names: dict[str, Any] = {"__name__": f"documented[{title}]"}
    for block in blocks:
        exec(compile(block, f"{page.name}: {title}", "exec"), names)
    return names
