"""The root package offers the public names, to programs and to type checkers alike, without loading torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fourbits

ROOT = Path(fourbits.__file__)


@pytest.mark.parametrize("name", dir(fourbits))
def test_a_public_name_is_what_its_module_defines(name):
    assert getattr(fourbits, name) is not None


def test_type_checkers_see_the_same_names_from_the_same_modules():
    block = next(node for node in ast.parse(ROOT.read_text()).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == fourbits._HOME


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'fourbits' has no attribute 'quantise'"):
        fourbits.quantise  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


def test_importing_the_root_does_not_load_torch():
    code = "import sys, fourbits; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
