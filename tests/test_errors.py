"""Every error of the library says what to do: no message ends with the value that it got."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.for_each import for_each

ROOT = Path(__file__).parents[1] / "src" / "fourbits"
FILES = sorted(ROOT.rglob("*.py"))
#: "got", then the value in one clause, to the period that ends the message or to a hint that may be empty
NOTHING_AFTER_THE_VALUE = re.compile(r"[,;] got [^.;?]*\.\0?$")


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of the strings in a file; values in f-strings are NULs, remedies are kept."""
    inner = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(map(_text, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inner:
            yield node.lineno, node.value


def _text(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    source = ast.unparse(part)
    return f" {source}" if "remedy" in source or "_WRITE" in source else "\0"


@for_each(FILES)
def test_no_error_ends_with_the_value_that_it_got(path):
    found = [
        line for line, text in texts(ast.parse(path.read_text())) if NOTHING_AFTER_THE_VALUE.search(text)
    ]
    assert found == [], "add what to do about it"


@pytest.mark.parametrize(
    ("message", "ends"),
    [
        ('f"steps must be at least 1, got {steps}."', True),
        ('f"steps must be at least 1, got {steps!r}.{hint}"', True),
        ('f"exactly one must be given, got {a}, {b}."', True),
        ('f"needs nvfp4 {block}, got {a} {b}."', True),
        ('f"must hold an object, got a {kind}."', True),
        ('"needs a name, got none."', True),
        ('f"must be the rows, got {a} entries that sum to {b}."', True),
        ('f"steps must be at least 1, got {steps}. Set it."', False),
        ('f"steps must be at least 1, got {steps}.{remedy}"', False),
        ('f"a reason in a sentence, got {steps}"', False),
    ],
)
def test_a_message_without_a_remedy_is_found(message, ends):
    [(_, text)] = texts(ast.parse(message))
    assert bool(NOTHING_AFTER_THE_VALUE.search(text)) is ends
