"""docs/architecture.md finds what it says it finds, and docstrings name files that exist."""

import ast
import re
from pathlib import Path

import pytest

from support.for_each import for_each

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src/fourbits"
FILES = sorted(SOURCES.rglob("*.py"))
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
#: (question, answer) of the table "Where is X?"
QUESTIONS = re.findall(r"^\| (.+\?) \| (.+) \|$", PAGE, re.MULTILINE)


def found(name):
    """The files that a name stands for: by the end of their path in the package, or in the repository."""
    inside = [path for path in SOURCES.rglob("*") if f"/{path.as_posix()}".endswith(f"/{name}")]
    return inside or [path for path in [ROOT / name] if path.exists()]


def test_the_six_files_of_the_core_have_at_most_1400_lines():
    core = re.findall(r"^\| \d \| `([\w/]+\.py)`", PAGE, re.MULTILINE)
    assert len(core) == 6
    assert sum(len((SOURCES / name).read_text().splitlines()) for name in core) <= 1400


@pytest.mark.parametrize("page", ["architecture.md", "decisions.md"])
def test_a_source_file_that_a_page_names_exists(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_]+/)+[\w]+\.(?:py|cpp|hpp|yaml))`", text)
    roots = (ROOT, ROOT / "src", SOURCES)
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


@pytest.mark.parametrize(("question", "answer"), QUESTIONS)
def test_the_files_of_an_answer_have_the_names_that_it_gives(question, answer):
    words = re.findall(r"`([^`/]+|[^`]+\.py)`", answer)
    files = {word: found(word) for word in words if word.endswith(".py")}
    assert all(files.values()), files
    text = "".join(path.read_text(encoding="utf-8") for paths in files.values() for path in paths)
    names = [word.rpartition(".")[2] for word in words if word not in files]
    assert [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)] == []


@for_each(FILES)
def test_a_file_that_a_docstring_names_exists(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented))
    named = re.findall(r"[\w./]*\w\.(?:py|cpp)\b", " ".join(texts))
    assert [name for name in named if not found(name)] == []
