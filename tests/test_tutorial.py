"""docs/tutorial.md is a script that prints what the page shows; nothing is compiled: see support/eager.py."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from support.eager import eager as eager

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
DECIMAL = re.compile(r"\d+\.\d\d\b")


def blocks() -> list[tuple[str, str]]:
    """(code, its output on the page), in order; code without output has an empty one."""
    found = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(found) >= 7
    return found


def test_the_script_prints_what_the_page_shows(tmp_path, monkeypatch):
    """Text and counts are equal. Losses and errors, of two decimals, are within 0.02 (order of sums)."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "tutorial"}
    for code, shown in blocks():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, PAGE.name, "exec"), names)
        printed = out.getvalue()
        assert DECIMAL.sub("#", printed) == DECIMAL.sub("#", shown)
        numbers = [float(number) for number in DECIMAL.findall(printed)]
        assert numbers == pytest.approx([float(n) for n in DECIMAL.findall(shown)], abs=0.02)
