"""The measurable part of the project's style: one idea in a file, one screen in a function, ASCII."""

import ast
from pathlib import Path

from support.for_each import for_each

ROOT = Path(__file__).parents[1]
FILES = sorted(p for top in ("src", "tests", "examples", "benchmarks") for p in (ROOT / top).rglob("*.py"))


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines after the docstring, which may be as long as the mathematics needs."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0  # pyright: ignore[reportOptionalOperand]


@for_each(FILES)
def test_a_file_holds_one_idea(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400, "longer than 400 lines: split it by idea"
    assert text.isascii(), f"line {next(i for i, s in enumerate(text.splitlines(), 1) if not s.isascii())}"


@for_each(FILES)
def test_a_function_fits_on_one_screen(path):
    limit = 80 if path.stem.endswith("_triton") else 40
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert body_lines(node) <= limit, f"{node.name} has {body_lines(node)} lines, at most {limit}"
