"""The scripts in examples/, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """The module of an example, which may import others of its folder."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        spec.loader.exec_module(module)
    return module
