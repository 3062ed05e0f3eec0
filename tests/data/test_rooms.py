"""The rooms of data import in one direction: stream below corpora below prepare."""

import ast
from pathlib import Path

import pytest

import fourbits.data

ROOT = Path(fourbits.data.__file__).parent
# What each room may import, besides itself and the shared files.
ALLOWED = {"stream": set(), "corpora": {"stream"}, "prepare": {"stream", "corpora"}}
SHARED = {"tokenizer", "tekken", "whole_file", "optional"}


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_the_rooms_below_it(room):
    for path in (ROOT / room).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fourbits.data."):
                other = (node.module or "").split(".")[2]
                assert other in ALLOWED[room] | SHARED | {room}, f"{path.name} imports {node.module}"


def test_every_folder_of_data_is_a_room():
    assert {path.parent.name for path in ROOT.glob("*/*.py")} == set(ALLOWED)
