"""What docs/extending.md says can be added from outside runs as it is written there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fourbits import convert, set_step
from fourbits.linear.module import QuantizedLinear

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = (
    "A correction",
    "A weight that arrives quantized",
    "Shards",
    "A recipe that changes",
)


def code_of(section: str) -> list[str]:
    """The Python blocks of a section."""
    body = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", body, re.DOTALL)


def train(model: nn.Module) -> None:
    model(torch.randn(32, 64)).sum().backward()


@pytest.fixture
def registries(monkeypatch):
    """Names that the page registers are forgotten afterwards: other tests use the same."""
    monkeypatch.setattr("fourbits.quant.correction._corrections", {})
    monkeypatch.setattr("fourbits.linear.amax_reduction._reductions", {})


@pytest.mark.parametrize("section", SECTIONS)
def test_the_code_of_a_section_runs_and_the_model_trains(section, registries):
    blocks = code_of(section)
    assert blocks
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    convert(model, "nvfp4")
    names: dict[str, Any] = {"model": model, "train": train}
    for block in blocks:
        exec(compile(block, f"extending.md, {section}", "exec"), names)
    set_step(model, 9)
    train(model)
    assert all(isinstance(layer, QuantizedLinear) for layer in model)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_every_file_that_the_page_names_exists():
    root = Path(__file__).parents[1]
    named = set(re.findall(r"tests/[\w/]+\.py", PAGE))
    named |= {
        f"src/fourbits/{name}" for name in re.findall(r"`((?:quant|gemm|linear|model)/[\w/]+\.py)`", PAGE)
    }
    assert len(named) > 15
    missing = [name for name in named if not (root / name).exists()]
    assert missing == []
