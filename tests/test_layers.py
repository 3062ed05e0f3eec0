"""The architecture as a test: imports point downwards, and a few things are known in one place only."""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from support.for_each import for_each

ROOT = Path(__file__).parents[1] / "src" / "fourbits"
SOURCES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))

LAYERS = [
    "version",
    "yaml_text",
    "settings",
    "triton_version",
    "compile_notice",
    "operators",
    "func_transforms",
    "device",
    "formats",
    "quant",
    "gemm",
    "recipe",
    "linear",
    "integrations",
    "model",
    "data",
    "exchange",
    "evaluate",
    "generate",
    "harness",
    "train",
    "evaluation",
    "plan",
    "lint",
    "bench",
    "compare",
    "cli",
    "__main__",
]
PRECISION = ["formats", "quant", "gemm", "recipe", "linear"]
BANNED = {(high, low) for high in ("model", "data", "exchange") for low in PRECISION} | {
    ("data", "model"),
    ("data", "device"),
    ("exchange", "device"),
    ("device", "settings"),
}

# Rooms of one layer, in one direction: compare/report shows what compare/run executed and compare/techniques
# measured.
ROOM_BANNED = {
    ("compare.run", "compare.report"),
    ("compare.run", "compare.techniques"),
    ("compare.techniques", "compare.report"),
    ("compare.proxies", "compare.report"),
    ("compare.run", "compare.proxies"),
    ("compare.techniques", "compare.proxies"),
    ("compare.statistics", "compare.run"),
    ("compare.statistics", "compare.report"),
}

# A room holds one way to compute. It is reached from its own package through the entries named here, from the
# same kind of room of another package, and from rooms that build on it: kernels and compiled code on the
# reference.
ROOMS = ("reference", "cpu", "kernels", "native")
BUILDS_ON = {"cpu": {"reference"}, "kernels": {"reference"}, "native": {"reference"}, "reference": set()}
ENTRIES = {
    "quant/grouped.py",
    "gemm/grouped.py",
    "quant/quantize.py",  # the dispatcher, what it checks, and the statistics of what it quantizes
    "quant/arguments.py",
    "quant/amax_stats.py",
    "quant/scale_hierarchy.py",  # the table of how block scales are derived and stored
    "quant/register.py",  # what users add to that table, tried out
    "gemm/matmul.py",
    "gemm/sums.py",
    "linear/amax_policy.py",
    "linear/fake_shapes.py",
    "model/ops/self_check.py",
    "model/ops/add_norm/op.py",
    "model/ops/mamba_step/op.py",
    "model/ops/conv/op.py",
    "model/ops/gated_norm/op.py",
    "model/ops/ssd/op.py",
}
# What others may know of a room: the self-check of a native backend, the random generator, the compiler.
SHARED = {"gemm.native.self_check", "gemm.native.sums_check", "gemm.native.probes"} | {
    "quant.reference.philox",
    "quant.cpu.compiled",
}
# Training loops of others, each known to the file of its own.
LOOPS = {"accelerate", "lightning", "pytorch_lightning", "torchtitan"}
# Heavy packages that only some users need: imported late, with an error that names the extra.
LATE = {"matplotlib", "transformers", "tensorboard", "lm_eval", "pyarrow", "datasets", "megatron"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def package_of(path: Path) -> list[str]:
    return ["fourbits", *path.parent.parts]


@cache
def imports(path: Path) -> list[str]:
    """Dotted names that a file imports, anywhere in it; `from a import b` counts as a.b."""
    return imported_by(path, ast.walk(tree(path)))


def imported_by(path: Path, nodes: Iterable[ast.AST]) -> list[str]:
    """Dotted names that these nodes of a file import."""
    found: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package_of(path)[: len(package_of(path)) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{module}.{alias.name}" for alias in node.names]
    return found


def layer(name: str) -> str:
    return name.split(".")[1].removesuffix(".py")


@cache
def own_imports(path: Path) -> list[str]:
    return [name for name in imports(path) if name.split(".")[0] == "fourbits"]


def here(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def siblings(path: Path) -> set[str]:
    """Stems of the files in the same folder that a file imports."""
    prefix = ".".join(package_of(path)) + "."
    local = {name.removeprefix(prefix).split(".")[0] for name in own_imports(path) if name.startswith(prefix)}
    return {stem for stem in local if (ROOT / path.parent / f"{stem}.py").exists()}


MODULES = [path for path in SOURCES if path.name != "__init__.py"]


@for_each(MODULES)
def test_imports_point_downwards(path):
    assert here(path) in LAYERS, f"{path} belongs to no layer of {LAYERS}"
    for name in own_imports(path):
        assert "." in name, f"{path} imports the root package, which only re-exports"
        there = layer(name)
        assert there in LAYERS, f"{path} imports {name} from the root package, which only re-exports"
        assert LAYERS.index(there) <= LAYERS.index(here(path)), f"{path} imports upwards: {name}"
        assert (here(path), there) not in BANNED, f"{path}: {here(path)} must not know {there}"


@pytest.mark.parametrize(("low", "high"), sorted(ROOM_BANNED))
def test_a_room_does_not_import_the_room_above_it(low, high):
    folder = Path(*low.split("."))
    files = [path for path in MODULES if path.parent == folder]
    assert files, f"{folder} has no files"
    for path in files:
        for name in own_imports(path):
            assert not name.startswith(f"fourbits.{high}."), f"{path} imports {name}"


def room_of(parts: list[str]) -> tuple[str, str] | None:
    """(package, room) of a dotted name or path below the root; None outside of rooms."""
    for i, part in enumerate(parts):
        if part in ROOMS and i:
            return ".".join(parts[:i]), part
    return None


@for_each(MODULES)
def test_a_way_to_compute_is_reached_through_its_entry(path):
    here_room = room_of(list(path.parent.parts))
    for name in own_imports(path):
        parts = name.split(".")[1:]
        there = room_of(parts)
        if there is None or str(path) in ENTRIES or any(".".join(parts).startswith(s) for s in SHARED):
            continue
        assert here_room is not None, f"{path} imports {name}; only entries and rooms of its kind may"
        same_kind = there[1] == here_room[1]
        assert same_kind or there[1] in BUILDS_ON[here_room[1]], f"{path}: {here_room[1]} imports {name}"


def test_files_of_one_folder_import_each_other_in_one_direction():
    after = {path: {path.parent / f"{stem}.py" for stem in siblings(path)} - {path} for path in MODULES}
    while ready := [path for path, needs in after.items() if not needs]:
        after = {path: needs.difference(ready) for path, needs in after.items() if path not in ready}
    assert not after, f"these files import each other in a circle: {sorted(map(str, after))}"


@for_each(MODULES)
def test_third_parties_are_known_in_one_place(path):
    for name in imports(path):
        if name.split(".")[0] == "triton":
            assert path.parent.name == "kernels", f"{path}: Triton belongs in a room of kernels"
        if name.startswith("torch.distributed"):
            assert path.parent.name == "ranks", f"{path}: torch.distributed belongs in a room of ranks"
        if name.split(".")[0] == "safetensors":
            assert here(path) == "exchange" or "checkpoint" in path.stem or "export" in path.stem, (
                f"{path}: not where checkpoints are exchanged"
            )


@for_each(MODULES)
def test_a_training_loop_of_others_is_known_to_its_integration_only(path):
    for loop in {name.split(".")[0] for name in imports(path)} & LOOPS:
        there = path.parent == Path("integrations") and path.stem.split("_")[0] in loop
        assert there, f"{path} imports {loop}, which belongs in integrations/"


def test_an_integration_fits_in_60_lines():
    libraries = LOOPS | {"transformers"}
    files = [path for path in MODULES if path.parent == Path("integrations")]
    found = [path for path in files if {name.split(".")[0] for name in imports(path)} & libraries]
    assert len(found) == 5
    assert [str(path) for path in found if len((ROOT / path).read_text().splitlines()) > 60] == []


@for_each(MODULES)
def test_imports_stand_at_the_top(path):
    for function in ast.walk(tree(path)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            late = {name.split(".")[0] for name in imported_by(path, ast.walk(function))} - LATE
            assert not late, f"{path}: {function.name} imports {sorted(late)} inside the function"


@for_each([p for p in SOURCES if p.name == "__init__.py"])
def test_an_init_file_is_a_docstring(path):
    body = tree(path).body
    assert ast.get_docstring(tree(path)), f"{path} has no docstring"
    assert path == Path("__init__.py") or len(body) == 1, f"{path} holds more than its docstring"
