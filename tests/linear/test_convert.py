"""convert changes what a model's linears compute, and nothing else about the model."""

import copy
import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import nn

from fourbits.linear.convert import convert
from fourbits.linear.module import QuantizedLinear
from fourbits.linear.step import counters_of, set_step
from fourbits.linear.summary import ConversionSummary
from fourbits.recipe.presets import get_recipe
from support.assertions import assert_same_bytes
from support.pickled import pickled
from support.straight_through import grad_of, linears

RECIPE = "nvfp4-naive"  # no BF16 blocks, no random bits


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32, bias=False))


def reasons(summary: ConversionSummary) -> dict[str, str]:
    return {row.name: row.reason for row in summary.rows if not row.quantized}


def test_the_keys_and_tensors_of_the_state_dict_stay_and_load_strictly_both_ways():
    plain, converted = mlp(), mlp()
    before = {key: value.shape for key, value in converted.state_dict().items()}
    convert(converted, RECIPE)
    assert {key: value.shape for key, value in converted.state_dict().items()} == before
    converted.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(converted.state_dict(), strict=True)
    assert torch.equal(linears(converted)[0].weight, linears(plain)[0].weight)


def test_parameters_stay_the_same_objects_so_an_optimizer_made_before_still_trains_them():
    model = mlp()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model, RECIPE)
    set_step(model, 0)
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    weight = parameters[0].detach().clone()
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(weight, parameters[0])


def test_modules_keep_their_identity_and_their_hooks():
    model = mlp()
    linear, calls = model[0], []
    linear.register_forward_hook(lambda *_: calls.append("forward"))
    convert(model, RECIPE)
    model(torch.randn(16, 32))
    assert model[0] is linear
    assert isinstance(linear, nn.Linear)
    assert calls == ["forward"]


def test_bf16_restores_the_linears():
    model = mlp()
    x = torch.randn(16, 32)
    before = model(x)
    convert(model, RECIPE)
    assert not torch.equal(model(x), before)
    convert(model, "bf16")
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Linear]
    assert_same_bytes(model(x), before)
    assert not any(hasattr(m, "quantization") for m in model)


def test_converting_twice_is_converting_once_by_the_second_recipe():
    once, twice = mlp(), mlp()
    twice.load_state_dict(once.state_dict())
    convert(twice, "mxfp4")
    expected, summary = convert(once, RECIPE), convert(twice, RECIPE)
    assert summary == expected
    x = torch.randn(16, 32)
    assert_same_bytes(twice(x), once(x))


def test_tied_weights_stay_in_bf16_and_are_listed():
    model = nn.ModuleDict(
        {"tokens": nn.Embedding(64, 32), "mid": nn.Linear(32, 32), "out": nn.Linear(32, 64)}
    )
    model["out"].weight = model["tokens"].weight
    summary = convert(model, RECIPE)
    assert type(model["out"]) is nn.Linear
    assert isinstance(model["mid"], QuantizedLinear)
    assert reasons(summary) == {"out": "weight is tied to another module"}


def test_embeddings_and_heads_stay_in_bf16_by_name_or_as_the_model_reports_them():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_patches, self.mid, self.words = (nn.Linear(32, 32) for _ in range(3))
            self.lm_head = nn.Linear(32, 32)

        def get_output_embeddings(self):
            return self.words

    assert set(reasons(convert(Model(), RECIPE))) == {"embed_patches", "words", "lm_head"}


def test_a_linear_subclass_is_kept_unless_it_says_that_it_only_casts_its_weight():
    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    class Casting(nn.Linear):
        casts_weight = True

    model = nn.Sequential(Scaled(32, 32), Casting(32, 32))
    assert reasons(convert(model, RECIPE)) == {"0": "Scaled computes more than nn.Linear"}
    assert isinstance(model[1], QuantizedLinear)
    convert(model, "bf16")
    assert type(model[1]) is Casting


def test_a_linear_whose_forward_was_replaced_on_the_instance_is_kept():
    model = mlp()
    forward = model[0].forward
    vars(model[0])["forward"] = lambda x: forward(x)  # as wrappers do that hook a module from outside
    assert "replaced on the instance" in reasons(convert(model, RECIPE))["0"]
    assert type(model[0]) is nn.Linear


def test_layers_whose_weights_a_fused_kernel_reads_are_refused_by_name():
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(32, 4),
            "encoder": nn.TransformerEncoderLayer(32, 4, 64),
            "after": nn.Linear(32, 32),
        }
    )
    kept = reasons(convert(model, RECIPE))
    assert set(kept) == {
        "attention.in_proj_weight",
        "attention.out_proj",
        "encoder.self_attn.in_proj_weight",
        "encoder.self_attn.out_proj",
    }
    reason = "a fused kernel of MultiheadAttention reads this weight directly"
    assert kept["attention.out_proj"] == kept["attention.in_proj_weight"] == reason
    assert kept["encoder.self_attn.out_proj"] == kept["encoder.self_attn.in_proj_weight"] == reason


def test_mamba_projections_of_transformers_are_refused_where_fused_kernels_read_them(monkeypatch):
    class Mixer(nn.Module):
        __module__ = "transformers.models.mamba"

        def __init__(self):
            super().__init__()
            self.conv1d = nn.Conv1d(4, 4, 2, groups=4)
            self.in_proj, self.x_proj, self.dt_proj, self.out_proj = (nn.Linear(32, 32) for _ in range(4))

    model = nn.Sequential(Mixer())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert set(reasons(convert(model, RECIPE))) == {"0.dt_proj"}
    model.use_kernels = True  # type: ignore[assignment]
    assert set(reasons(convert(model, RECIPE))) == {"0.x_proj", "0.dt_proj", "0.out_proj"}
    del model.use_kernels
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "mamba_ssm" else None)
    kept = reasons(convert(model, RECIPE))
    assert set(kept) == {"0.x_proj", "0.dt_proj", "0.out_proj"}
    assert kept["0.out_proj"] == "a fused kernel of Mixer reads this weight directly"


@pytest.mark.parametrize(
    ("home", "names", "read"),
    [
        ("transformers_modules.nvidia.modeling_nemotron_h", ("in_proj", "out_proj"), {"out_proj"}),
        ("mamba_ssm.modules.mamba2", ("in_proj", "out_proj"), {"out_proj"}),
        (
            "mamba_ssm.modules.mamba_simple",
            ("in_proj", "x_proj", "dt_proj", "out_proj"),
            {"in_proj", "x_proj", "dt_proj", "out_proj"},
        ),
        ("mine.mixers", ("in_proj", "out_proj"), set()),
    ],
)
def test_mixers_of_checkpoints_and_of_mamba_ssm_are_known_by_their_package(home, names, read, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "mamba_ssm" else None)
    mixer = type("Mixer", (nn.Module,), {"__module__": home})()
    mixer.conv1d = nn.Conv1d(4, 4, 2, groups=4)
    for name in names:
        setattr(mixer, name, nn.Linear(32, 32))
    model = nn.Sequential(mixer, nn.Linear(32, 32))
    assert set(reasons(convert(model, RECIPE))) == {f"0.{name}" for name in read}


def test_a_linear_that_was_wrapped_after_its_conversion_cannot_be_converted_again():
    model = mlp()
    convert(model, RECIPE)
    linears(model)[0].__class__ = type("FSDPQuantizedLinear", (QuantizedLinear,), {})
    with pytest.raises(ValueError, match=r"convert: '0' was wrapped .* FSDPQuantizedLinear, .*to blocks"):
        convert(model, "bf16")


@pytest.mark.parametrize(("k", "n"), [(20, 48), (32, 7), (17, 33), (1, 1)])
def test_widths_that_are_no_multiple_of_16_are_padded_and_the_summary_says_so(k, n):
    model = nn.Sequential(nn.Linear(k, n))
    (row,) = convert(model, "nvfp4").rows
    assert row.quantized
    assert f"{n}x{k} is padded to multiples of 16" in row.reason
    set_step(model, 0)
    x = torch.randn(5, k, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert (y.shape, grad_of(x).shape) == ((5, n), (5, k))
    assert grad_of(linears(model)[0].weight).shape == (n, k)


def test_the_meta_device_converts_and_materializes():
    with torch.device("meta"):
        model = mlp()
    summary = convert(model, RECIPE)
    set_step(model, 3)
    assert summary.share_of_linears == 1
    assert model(torch.empty(16, 32, device="meta")).shape == (16, 32)
    source = mlp()
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    convert(source, RECIPE)
    x = torch.randn(16, 32)
    assert_same_bytes(model(x), source(x))


def gradient_bytes(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(grad_of(p).clone() for p in model.parameters())]


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_copy_computes_the_same_bits_and_keeps_its_own_counter(copied):
    model = mlp()
    convert(model, "nvfp4", seed=5)
    set_step(model, 7)
    x = torch.randn(32, 32)
    other = copied(model)
    expected = gradient_bytes(model, x)
    set_step(model, 8)
    for got, want in zip(gradient_bytes(other, x), expected, strict=True):
        assert_same_bytes(got, want)
    set_step(other, 8)
    assert not torch.equal(gradient_bytes(other, x)[1], expected[1])


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode"])
def test_evaluation_quantizes_as_training_does(mode):
    model = mlp()
    convert(model, RECIPE)
    x = torch.randn(16, 32)
    expected = model(x).detach()
    if mode == "eval":
        assert_same_bytes(model.eval()(x).detach(), expected)
    else:
        with getattr(torch, mode)():
            assert_same_bytes(model(x), expected)


def test_evaluation_is_nn_linears_where_the_recipe_says_so():
    model = mlp()
    x = torch.randn(16, 32)
    plain = model(x).detach()
    convert(model, replace(get_recipe(RECIPE), quantize_eval=False))
    assert not torch.equal(model(x), plain)
    assert_same_bytes(model.eval()(x).detach(), plain)


def test_an_unknown_recipe_and_a_seed_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"no recipe is called 'nvpf4'\. Did you mean 'nvfp4'\?"):
        convert(mlp(), "nvpf4")
    for seed in (-1, 1 << 32, 1.5, True):
        with pytest.raises(
            ValueError, match=rf"convert: seed must be an int in \[0, 2\*\*32\), got {seed}\."
        ):
            convert(mlp(), RECIPE, seed=seed)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ((1.5, 0), r"step must be an int, got 1\.5\. Pass a whole number\."),
        ((True, 0), r"step must be an int, got True"),
        ((0, 16.0), r"first_token must be an int, got 16\.0"),
        ((-1, 0), r"step must be in \[0, 2\*\*32\), got -1\. Count optimizer steps from 0\."),
        ((0, -1), r"first_token must be in \[0, 2\*\*62\), got -1\. Count the tokens of a step from 0\."),
    ],
)
def test_an_invalid_position_is_refused_and_leaves_the_model_where_it_was(position, message):
    model = mlp()
    convert(model, RECIPE)
    set_step(model, 3, first_token=32)
    with pytest.raises(ValueError, match=f"set_step: {message}"):
        set_step(model, *position)
    assert [counter.tolist() for counter in counters_of(model)] == [[0, 3, 32, 2, 0, 0, 0, 0, 0]]
