"""What the functions of a conversion take: parts of a model everywhere, and one short error otherwise."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import fourbits as fb
from fourbits.func_transforms import UnsupportedTransformError


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


@pytest.mark.parametrize("wrong", [None, 5, [], [model(), None]])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("convert", lambda m: fb.convert(m, "nvfp4")),
        ("set_step", lambda m: fb.set_step(m, 0)),
        ("audit", fb.audit),
        ("set_recipe", lambda m: fb.set_recipe(m, "nvfp4")),
    ],
)
def test_an_argument_that_is_no_model_is_named(name, call, wrong):
    with pytest.raises(ValueError, match=f"^{name}: model must be an nn.Module or a list of them, got"):
        call(wrong)


def test_set_step_of_a_model_that_was_never_converted_is_an_error():
    plain = model()
    with pytest.raises(
        ValueError, match=r"^set_step: model must have been converted, got a Sequential .*convert\("
    ):
        fb.set_step(plain, 0)
    with pytest.raises(ValueError, match=r"^set_step: model must have been converted"):
        fb.set_step([plain, model()], 0)


def test_set_step_does_nothing_to_a_model_that_stays_in_bf16_nor_to_copies_and_wrappers_of_it():
    baseline = model()
    fb.convert(baseline, "bf16")
    wrapped = nn.Sequential(copy.deepcopy(baseline))
    for each in (baseline, wrapped, [baseline, model()], pickle.loads(pickle.dumps(baseline))):
        fb.set_step(each, 0)
    keys = baseline.state_dict().keys()
    assert keys == model().state_dict().keys()


def test_parts_of_a_model_go_through_every_function():
    """What convert takes, the others take: two parts train as one model of both does."""
    torch.manual_seed(0)
    whole = nn.ModuleDict({"encoder": model(), "decoder": model()})
    parts = [copy.deepcopy(part) for part in whole.values()]
    x = torch.randn(32, 32)
    plain = replace(fb.get_recipe("nvfp4"), keep_bf16=fb.KeepBF16(names=()))
    gradients = []
    for given, (first, second) in ((whole, whole.values()), (parts, parts)):
        fb.convert(given, "nvfp4-naive")
        fb.set_recipe(given, plain)
        fb.set_step(given, 3, first_token=32)
        second(first(x)).sum().backward()
        assert len(fb.audit(given).called) == 4
        gradients.append([p.grad for part in (first, second) for p in part.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("option", ["include", "exclude", "stacks", "keep_first"])
def test_bf16_restores_every_layer_whatever_choice_it_is_given(option):
    converted = model()
    fb.convert(converted, "nvfp4")
    choice: Any = {option: 1 if option == "keep_first" else "nothing.*"}
    fb.convert(converted, "bf16", **choice)
    assert [type(module) for module in converted] == [nn.Linear, nn.ReLU, nn.Linear]


def test_a_filter_is_asked_once_per_layer_and_an_error_in_it_changes_nothing():
    asked: list[str] = []
    converted = model()
    fb.convert(converted, "nvfp4", filter_fn=lambda module, name: bool(asked.append(name)) or name == "0")
    assert asked == ["0", "2"]
    kinds = [type(module) for module in converted]

    def fails(module: nn.Module, name: str) -> bool:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fb.convert(converted, "nvfp4", filter_fn=fails)
    assert [type(module) for module in converted] == kinds
    with pytest.raises(ValueError, match=r"filter_fn must be a function \(module, name\) -> bool, got 5"):
        fb.convert(converted, "nvfp4", filter_fn=5)  # pyright: ignore[reportArgumentType]


def test_a_recipe_file_that_is_missing_is_named_with_the_shipped_recipes():
    with pytest.raises(ValueError, match=r"recipe: 'mine\.yaml' must be a file, and there is none.*nvfp4-46"):
        fb.convert(model(), "mine.yaml")


def test_the_nearest_module_is_found_in_upper_or_lower_case():
    named = nn.ModuleDict({"wo": nn.Linear(32, 32)})
    with pytest.raises(ValueError, match=r"got '\*\.WO', which matches none\. The nearest is 'wo'"):
        fb.convert(named, "nvfp4", exclude="*.WO")


def test_stacks_are_asked_for_by_name():
    with pytest.raises(ValueError, match=r"stacks must be a pattern .* got 5\. Name containers"):
        fb.convert(model(), "nvfp4", stacks=5)  # pyright: ignore[reportArgumentType]


def test_forward_mode_ad_is_the_named_error():
    converted = model()
    fb.convert(converted, "nvfp4")
    with forward_ad.dual_level(), pytest.raises(UnsupportedTransformError, match="forward-mode AD"):
        converted(forward_ad.make_dual(torch.randn(16, 32), torch.randn(16, 32)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:UserWarning")
@pytest.mark.parametrize("recipe", ["nvfp4", "bf16"])
def test_a_layer_without_a_shape_and_one_of_torchscript_are_named(recipe):
    with pytest.raises(ValueError, match=r"^convert: parameters must have shapes, got '1', a LazyLinear "):
        fb.convert(nn.Sequential(nn.Linear(32, 32), nn.LazyLinear(32)), recipe)
    scripted = nn.ModuleDict({"a": nn.Linear(32, 32), "b": torch.jit.script(nn.Linear(32, 32))})
    with pytest.raises(ValueError, match=r"^convert: modules must run in Python, got 'b', .*TorchScript"):
        fb.convert(scripted, recipe)
