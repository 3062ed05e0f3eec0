import math

import pytest
import torch

from fourbits.model.init import initialize
from model.shapes import small_model


def named(model):
    return dict(model.named_parameters())


def assert_normal(weight, std):
    """The sample's mean and deviation are within five standard errors of N(0, std)."""
    n = weight.numel()
    assert abs(weight.mean()) <= 5 * std / n**0.5
    assert abs(weight.std() - std) <= 5 * std / (2 * n) ** 0.5


@pytest.mark.parametrize(("pattern", "branches"), [("M-*-", 4), ("TTT", 6), ("MT", 3)])
def test_linears_are_normal_and_those_that_write_to_the_residual_shrink_with_depth(pattern, branches):
    for name, weight in named(small_model(pattern, init_std=0.02)).items():
        if weight.dim() == 2 and "conv" not in name:
            writes = any(part in name for part in ("o_proj", "out_proj", "down_proj"))
            assert_normal(weight, 0.02 / math.sqrt(branches) if writes else 0.02)


def test_mamba_starts_with_the_published_time_scales():
    parameters = named(small_model("M", mamba_num_heads=512, num_groups=2))
    decay = parameters["blocks.0.mixer.A_log"].exp()
    assert decay.min() >= 1
    assert decay.max() <= 16
    assert abs(decay.mean() - 8.5) <= 5 * (15 / 12**0.5) / 512**0.5  # uniform
    step = torch.nn.functional.softplus(parameters["blocks.0.mixer.dt_bias"])
    assert step.min() >= 0.001 * (1 - 1e-4)
    assert step.max() <= 0.1 * (1 + 1e-4)
    log_step, width = step.log(), math.log(0.1 / 0.001)
    assert abs(log_step.mean() - math.log(0.01)) <= 5 * (width / 12**0.5) / 512**0.5  # log-uniform
    assert torch.equal(parameters["blocks.0.mixer.D"], torch.ones(512))


def test_convolutions_start_as_pytorch_would_start_them_and_gains_at_one():
    parameters = named(small_model("M-"))
    taps = parameters["blocks.0.mixer.conv_weight"]
    assert taps.abs().max() <= 0.5  # 1 / sqrt(4)
    assert abs(taps.std() - 0.5 / 3**0.5) <= 5 * 0.5 / taps.numel() ** 0.5
    for name in ("norm.weight", "blocks.0.norm.weight", "blocks.0.mixer.norm_weight", "blocks.1.norm.weight"):
        assert (parameters[name] == 1).all()


def test_a_seed_decides_every_value_whatever_happened_before():
    first = named(small_model("M-*-T", seed=3))
    torch.manual_seed(99)
    torch.rand(5)
    second = named(small_model("M-*-T", seed=3))
    other = named(small_model("M-*-T", seed=4))
    for name, value in first.items():
        assert torch.equal(value, second[name])
        drawn = name.rsplit(".", 1)[-1] not in ("D", "norm_weight") and "norm.weight" not in name
        assert torch.equal(value, other[name]) != drawn, name


def test_a_deeper_model_starts_with_the_same_embedding_and_first_inputs():
    shallow, deep = named(small_model("M-")), named(small_model("M-*-M-"))
    for name in (
        "embed.weight",
        "head.weight",
        "blocks.0.mixer.in_proj.weight",
        "blocks.1.mixer.up_proj.weight",
    ):
        assert torch.equal(shallow[name], deep[name])


def test_a_model_from_the_meta_device_is_initialized_to_the_same_bits():
    with torch.device("meta"):
        model = small_model("M-*-")
    model.to_empty(device="cpu")
    initialize(model, model.config, seed=5)
    for name, value in named(small_model("M-*-", seed=5)).items():
        assert torch.equal(named(model)[name], value)
