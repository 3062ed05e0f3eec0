"""Errors about a run's folder say what to do: after the problem comes one more sentence, or a remedy."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "fourbits"
FILES = (
    "train/checkpoint.py",
    "train/metrics.py",
    "train/run_folder.py",
    "train/session.py",
    "train/load_run.py",
    "train/trainer.py",
    "compare/run/run_matrix.py",
    "compare/report/runs.py",
)


def errors(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of exceptions in raise statements."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield node.exc


def sentences(message: ast.expr) -> int:
    """Number of sentences in a text; a value named a remedy counts as one."""
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)
    remedies = sum("_remedy" in ast.unparse(part) for part in parts)
    return text.count(". ") + text.endswith(".") + remedies


@pytest.mark.parametrize("file", FILES)
def test_every_error_says_what_to_do(file):
    found = list(errors(ast.parse((SOURCES / file).read_text(encoding="utf-8"))))
    assert found, "raises nothing: remove it from FILES"
    for error in found:
        name = ast.unparse(error.func)
        if name in ("ValueError", "NonFiniteError"):
            assert sentences(error.args[0]) >= 2, f"line {error.lineno}: {ast.unparse(error.args[0])}"
