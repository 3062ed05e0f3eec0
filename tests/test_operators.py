"""Operators carry the digest of their sources, so that compilers find no graph of other sources on disk."""

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from fourbits import operators
from fourbits.operators import OVERLOAD, TRACED, digest_of, operator

#: an operator of these tests
PROBE = "traced_for_a_test"
PACKAGE = Path(operators.__file__).parent


def test_every_operator_has_the_overload_of_the_sources():
    for module in ("linear.convert", "model.ops.conv.op", "model.ops.gated_norm.op", "model.ops.ssd.op"):
        import_module(f"fourbits.{module}")
    schemas: Any = torch._C._jit_get_all_schemas()
    found = {schema.name: schema.overload_name for schema in schemas if schema.name.startswith("fourbits::")}
    found.pop(f"fourbits::{PROBE}", None)
    assert {"fourbits::linear", "fourbits::experts", "fourbits::conv_backward"} <= set(found)
    assert set(found.values()) == {OVERLOAD}


def test_every_file_that_defines_an_operator_is_in_the_digest():
    defining = ("@operator(", "@custom_op(")
    files = [path for path in PACKAGE.rglob("*.py") if any(word in path.read_text() for word in defining)]
    assert len(files) >= 10
    assert {path.relative_to(PACKAGE).parts[0] for path in files} <= set(TRACED)


def test_a_changed_moved_or_added_source_changes_the_digest(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "linear").mkdir(parents=True)
    (first / "linear" / "a.py").write_text("x = 1\n")
    shutil.copytree(first, second)
    assert digest_of(first) == digest_of(second)
    (second / "linear" / "a.py").write_text("x = 2\n")
    changed = digest_of(second)
    (second / "linear" / "a.py").rename(second / "linear" / "b.py")
    moved = digest_of(second)
    (second / "linear" / "c.py").touch()
    assert len({digest_of(first), changed, moved, digest_of(second)}) == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_graph_on_disk_serves_only_the_sources_it_was_traced_from(monkeypatch):
    """The compiler sees what the operator is traced into; its cache knows the operator's name alone."""

    def defined(overload: str, added: float) -> Any:
        monkeypatch.setattr(operators, "OVERLOAD", overload)
        return operator(f"{PROBE}(Tensor x) -> Tensor")(lambda x: x + added)

    def result_of(call: Any) -> list[float]:
        torch.compiler.reset()

        def graph(x: Tensor) -> Tensor:
            return call(x)

        return torch.compile(graph, fullgraph=True)(torch.zeros(3)).tolist()

    with fresh_cache():
        calls = defined("v1", 1.0), defined("v2", 2.0)
        counters.clear()
        assert [result_of(call) for call in (*calls, calls[0])] == [[1.0] * 3, [2.0] * 3, [1.0] * 3]
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1, "the third, of the first's sources"
    torch.compiler.reset()
