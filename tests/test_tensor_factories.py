"""Every tensor of the package names its dtype and device, so that no default of the caller decides them."""

import ast
from pathlib import Path

from support.for_each import for_each

ROOT = Path(__file__).parents[1] / "src" / "fourbits"
SOURCES = sorted(ROOT.rglob("*.py"))
#: the functions of torch whose result takes the caller's default dtype or device
FACTORIES = {
    *("empty", "zeros", "ones", "full", "eye", "empty_strided", "scalar_tensor", "complex"),
    *("tensor", "as_tensor", "asarray", "arange", "range", "linspace", "logspace"),
    *("rand", "randn", "randint", "randperm", "normal", "tril_indices", "triu_indices"),
}
#: parameters are made where the caller builds the model: on the meta device, to count or to load
ON_THE_CALLERS_DEVICE = {"model/experts.py", "model/layers.py", "model/lm.py", "model/mamba2.py"}


def unnamed(path: Path) -> list[str]:
    """Places in a file where a factory leaves a dtype or device to the caller's defaults."""
    needed = {"dtype"} if path.relative_to(ROOT).as_posix() in ON_THE_CALLERS_DEVICE else {"dtype", "device"}
    return unnamed_in(path.read_text(encoding="utf-8"), needed)


def unnamed_in(text: str, needed: set[str]) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in FACTORIES
        ):
            named = {keyword.arg for keyword in node.keywords}
            is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if is_torch and needed - named:
                found.append(f"line {node.lineno}: {ast.unparse(node)} lacks {sorted(needed - named)}")
    return found


@for_each(SOURCES)
def test_every_tensor_names_its_dtype_and_device(path):
    assert unnamed(path) == []


@for_each(SOURCES)
def test_torch_is_imported_under_its_own_name(path):
    """Else the test above would not see its functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not any(alias.name == "torch" and alias.asname for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            assert not {alias.name for alias in node.names} & FACTORIES


def test_a_factory_without_them_is_found():
    assert unnamed_in("x = torch.empty(3)", {"dtype", "device"}) == [
        "line 1: torch.empty(3) lacks ['device', 'dtype']"
    ]
    assert unnamed_in("x = torch.full((), 1.0, dtype=d)", {"dtype", "device"}) == [
        "line 1: torch.full((), 1.0, dtype=d) lacks ['device']"
    ]
    assert unnamed_in("x = torch.zeros(3, dtype=d, device=e); y = x.empty(3)", {"dtype", "device"}) == []
