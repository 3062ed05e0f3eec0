"""Compiled regions: the same results, one graph for all layers and models, eager where none compiles."""

import warnings
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

from fourbits.model.config import RopeScaling
from fourbits.model.regions import RegionModule, compile_regions
from model.shapes import random_tokens, small_model

PATTERN = "M-*-M-"
REGIONS = 5  # norm, Mamba core, attention core, squared ReLU, cross-entropy


def loss_and_gradients(model, tokens):
    model.zero_grad()
    loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **grads}


def evaluation(model, tokens):
    with torch.no_grad():
        loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:])
    assert not loss.requires_grad
    return {"loss": loss}


def graphs_compiled():
    return counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def runs():
    """A BF16 model's loss and gradients: eager, compiled, and compiled again for a second model."""
    torch.manual_seed(0)
    tokens = random_tokens(2, 25)
    found: dict[str, dict] = {"fp32": loss_and_gradients(small_model(PATTERN), tokens)}
    for name, seed in (("eager", 0), ("compiled", 0), ("again", 0), ("other model", 1), ("evaluated", 0)):
        measure = evaluation if name == "evaluated" else loss_and_gradients
        model = small_model(PATTERN, dtype=torch.bfloat16, seed=seed)
        if name != "eager":
            compile_regions(model)
        before = graphs_compiled()
        found[name] = measure(model, tokens)
        found[name]["graphs"] = graphs_compiled() - before
    return found


def test_compiled_regions_are_as_close_to_fp32_as_eager_ones(runs):
    for name, exact in runs["fp32"].items():
        eager, compiled = ((runs[kind][name] - exact).norm() for kind in ("eager", "compiled"))
        # Both round to BF16 at the same places; what differs is FP32 inside. Where eager happens to be
        # lucky, half a BF16 unit is still what one rounding may cost.
        assert compiled <= 1.5 * eager + 2**-9 * exact.norm(), name


def test_one_graph_serves_all_layers_and_models(runs):
    assert runs["compiled"]["graphs"] == REGIONS
    assert runs["again"]["graphs"] == runs["other model"]["graphs"] == 0


def test_evaluation_runs_the_graphs_of_training_with_the_same_bits(runs):
    assert runs["evaluated"]["graphs"] == 0
    assert torch.equal(runs["evaluated"]["loss"], runs["compiled"]["loss"])


def test_compiled_regions_give_equal_bits_for_equal_inputs(runs):
    for name, value in runs["compiled"].items():
        if name != "graphs":
            assert torch.equal(value, runs["again"][name]), name


def test_attention_of_imported_models_compiles_to_the_same_numbers():
    changes: dict[str, Any] = {
        "qk_norm": True,
        "sliding_window": 9,
        "rope_theta": 1e4,
        "rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_seq_len=64),
    }
    tokens = random_tokens(2, 25)
    model = small_model("T", **changes)
    eager = loss_and_gradients(model, tokens)
    compile_regions(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* runs uncompiled")
        compiled = loss_and_gradients(model, tokens)
    for name, wanted in eager.items():
        # FP32 sums of up to 96 terms in another order, through one block.
        assert (compiled[name] - wanted).norm() <= 1e-5 * wanted.norm(), name


def test_regions_can_be_made_eager_again(runs):
    model = small_model(PATTERN, dtype=torch.bfloat16)
    compile_regions(model)
    compile_regions(model, None)
    torch.manual_seed(0)
    eager = loss_and_gradients(model, random_tokens(2, 25))
    assert all(torch.equal(value, runs["eager"][name]) for name, value in eager.items())


def doubled(x):
    return 2 * x


def test_without_a_compiler_regions_stay_eager_after_one_warning_with_the_reason():
    module = RegionModule()
    compile_regions(module)
    with fresh_cache(), inductor_config.patch({"cpp.cxx": (None, "/no/such/compiler")}):
        with pytest.warns(UserWarning, match=r"doubled runs uncompiled .* No working C\+\+ compiler"):
            assert torch.equal(module.run(doubled, torch.ones(3)), torch.full((3,), 2.0))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(module.run(doubled, torch.ones(4)), torch.full((4,), 2.0))


def failing(x):
    raise ValueError("the region's own error")


def test_an_error_of_the_region_is_not_mistaken_for_a_compilation_failure():
    module = RegionModule()
    compile_regions(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="own error"):
            module.run(failing, torch.ones(3))
