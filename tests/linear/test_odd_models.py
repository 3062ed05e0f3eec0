"""Models that nothing in the conversion is made for: what is claimed runs, and no product is silent."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fourbits as fb
from support import odd_models
from support.multiplied import Multiplied
from support.odd_models import ODD_MODELS

RECIPE = "nvfp4-naive"
READ = "{} reads this weight and never calls the layer"
#: layers that are not claimed because their class's source shows that it only reads them
KNOWN = {
    "OwnFunctions": {"read"},
    "LoRALike": {"merged"},
    "MadeLater": {"skip_0", "skip_1", "skip_2"},
    "Property": {"inner"},
    "Stateful": {"right"},
}
#: what no source shows, and the audit does: bypassed layers, and parameters that were not counted
FOUND = {
    "ThroughArguments": ({"owner.proj"}, {"owner.query"}),
    "Scripted": ({"past"}, {"table"}),
    "Property": (set[str](), {"_table"}),
}
#: a vector, which is in no row
VECTORS = {"code"}


def read_by_products(model: nn.Module, x: torch.Tensor) -> set[str]:
    """Names of the parameters of a copy that products read, under all of their names."""
    copied: Any = copy.deepcopy(model)
    with Multiplied(copied) as read:
        copied(x)
    ids = {id(p) for name, p in copied.named_parameters() if name in read.names}
    return {name for name, p in copied.named_parameters(remove_duplicate=False) if id(p) in ids}


@pytest.mark.parametrize("kind", ODD_MODELS, ids=lambda kind: kind.__name__)
def test_what_is_claimed_runs_and_no_product_is_silent(kind):
    torch.manual_seed(0)
    model, x, name = kind(), torch.randn(8, 32), kind.__name__
    read = read_by_products(model, x)
    summary = fb.convert(model, RECIPE)
    fb.set_step(model, 0)
    loss = model(x).square().mean()
    loss.backward()
    report = fb.audit(model, loss)
    bypassed, multiplied = FOUND.get(name, (set(), set()))
    assert (set(report.bypassed), set(report.multiplied)) == (bypassed, multiplied)
    claimed = {row.name for row in summary.rows if row.quantized}
    assert claimed - set(report.called) - bypassed == ({"spare"} if name == "Stateful" else set())
    assert {row.name for row in summary.rows if row.reason == READ.format(name)} == KNOWN.get(name, set())
    rows = {row.name for row in summary.rows}
    plain = {each.replace(".parametrizations.", ".").removesuffix(".original1") for each in read}
    silent = {each for each in plain if not {each, each.removesuffix(".weight")} & rows}
    assert silent - multiplied - VECTORS == set()


@pytest.mark.filterwarnings("ignore:fourbits. 1 layer that convert quantized is never called")
@pytest.mark.parametrize(
    "kind", [kind for kind in ODD_MODELS if kind.__name__ in FOUND], ids=lambda k: k.__name__
)
def test_what_no_source_shows_is_warned_of_at_the_first_step(kind):
    torch.manual_seed(0)
    model = kind()
    fb.convert(model, RECIPE)
    fb.set_step(model, 0)
    model(torch.randn(8, 32)).square().mean().backward()
    with pytest.warns(UserWarning, match="products multiply by"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_second_product_with_the_weight_of_a_quantized_layer_is_in_its_reason():
    summary = fb.convert(odd_models.TiedTransposed(), RECIPE)
    assert {row.name: row.reason for row in summary.rows} == {
        "encoder": f"recipe {RECIPE}; TiedTransposed also multiplies by this weight, in high precision",
        "middle": f"recipe {RECIPE}",
    }
