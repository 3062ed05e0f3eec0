"""The Mamba-2 mixer against its definition from the recurrence and PyTorch's convolution."""

import pytest
import torch
from torch.nn import functional as F

from fourbits.model.mamba2 import Mamba2
from fourbits.model.ops.conv.reference import causal_conv
from fourbits.model.ops.ssd.reference import ssd as recurrence

SIZES = {"num_heads": 6, "head_dim": 8, "state_size": 5, "num_groups": 2, "conv_width": 4}


def mixer(chunk_size=8):
    layer = Mamba2(24, **SIZES, chunk_size=chunk_size, eps=1e-5)
    for name, parameter in layer.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if name in ("D", "norm_weight") else 0.0, std=0.3)
    return layer


def written_out(layer, x):
    """arXiv:2405.21060 section 7, in the dtype of x."""
    w = {name: parameter.to(x.dtype) for name, parameter in layer.named_parameters()}
    z, xbc, dt = (x @ w["in_proj.weight"].T).split((48, 68, 6), dim=-1)
    xbc = F.conv1d(xbc.mT, w["conv_weight"], w["conv_bias"], padding=3, groups=68).mT[:, : x.shape[1]]
    value, b, c = F.silu(xbc).split((48, 10, 10), dim=-1)
    value = value.unflatten(-1, (6, 8))
    y = recurrence(
        value,
        F.softplus(dt + w["dt_bias"]),
        -w["A_log"].exp(),
        b.unflatten(-1, (2, 5)),
        c.unflatten(-1, (2, 5)),
        w["D"],
    )
    y = y.flatten(2) * F.silu(z)
    y = F.rms_norm(y.unflatten(-1, (2, 24)), (24,), eps=1e-5).flatten(2) * w["norm_weight"]
    return y @ w["out_proj.weight"].T


@pytest.mark.parametrize("length", [1, 3, 8, 29])
def test_the_mixer_matches_its_definition_in_value_and_gradients(length):
    layer = mixer()
    x = torch.randn(2, length, 24, requires_grad=True)
    inputs = (x, *layer.parameters())
    found = layer(x)
    dy = torch.randn_like(found)
    wanted = written_out(layer, x.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)  # FP32, values of about one
    grads = torch.autograd.grad(found, inputs, dy), torch.autograd.grad(wanted, inputs, dy.double())
    for got, true in zip(*grads, strict=True):
        # FP32; the gradients of A and dt are small differences of large sums, see test_ssd.py.
        assert (got - true).norm() <= 1e-4 * true.norm() + 1e-4


@torch.no_grad()
def test_time_steps_below_the_minimum_are_clamped_and_others_unchanged():
    free, raised = mixer(), mixer()
    free.in_proj.weight[-6:] = 0  # so that every time step is softplus(dt_bias)
    raised.load_state_dict(free.state_dict())
    steps = torch.tensor([1e-4, 0.01, 0.3, 1e-3, 0.5, 2.0])
    raised.min_time_step = 0.3
    raised.dt_bias.copy_(steps.expm1().log())
    free.dt_bias.copy_(steps.clamp(min=0.3).expm1().log())
    x = torch.randn(2, 29, 24)
    torch.testing.assert_close(raised(x), free(x), rtol=1e-5, atol=1e-5)


def test_the_convolution_matches_pytorchs():
    x, taps, bias = torch.randn(2, 9, 6), torch.randn(4, 6), torch.randn(6)
    wanted = F.conv1d(x.mT, taps.T[:, None], bias, padding=3, groups=6).mT[:, :9]
    torch.testing.assert_close(causal_conv(x, taps, bias), wanted)


def test_both_projections_run_as_modules_so_that_a_recipe_can_replace_them():
    layer = mixer()
    called = []
    for name in ("in_proj", "out_proj"):
        getattr(layer, name).register_forward_hook(lambda *_, name=name: called.append(name))
    layer(torch.randn(1, 8, 24))
    assert called == ["in_proj", "out_proj"]
