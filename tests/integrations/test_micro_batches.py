"""Every micro-batch of a loop gets tokens of its own, over processes and accumulation."""

import pytest
import torch
from torch import nn

from fourbits.integrations.micro_batches import MicroBatches
from fourbits.linear.convert import convert
from support.loops import noted_positions


def linears(recipe: str = "nvfp4") -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    convert(model, recipe)
    return model


@pytest.mark.parametrize(("tokens", "stride"), [(64, 64), (50, 64), (1, 16)])
def test_micro_batches_of_a_step_are_disjoint_over_ranks_and_each_step_begins_at_zero(
    tokens, stride, monkeypatch
):
    calls = noted_positions(monkeypatch)
    for rank in range(3):
        batches = MicroBatches(linears(), tokens, rank, 3)
        for step in (4, 4, 5, 5):
            batches.begin(step)
    starts = [first for step, first in calls if step == 4]
    assert sorted(starts) == [number * stride for number in range(6)]
    assert [call for call in calls if call[0] == 5] == [(5, first) for first in starts]


def test_two_micro_batches_draw_the_bits_that_one_of_their_tokens_draws(monkeypatch):
    """With amaxes equal in all of them, two halves give the gradient of the whole."""
    x, dy = torch.ones(64, 32), torch.randn(64, 32).clamp(-0.5, 0.5)
    dy[::32, 0] = 1.0  # the same amax in each half
    grads: list[torch.Tensor] = []
    for parts in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32))
        convert(model, "nvfp4")
        batches, inputs = MicroBatches(model, 64 // parts), x.clone().requires_grad_()
        for half, gradient in zip(inputs.chunk(parts), dy.chunk(parts), strict=True):
            batches.begin(7)
            model(half).backward(gradient)
        assert inputs.grad is not None
        grads.append(inputs.grad)
    assert torch.equal(*grads)
    assert len(grads[0].unique(dim=0)) > 1


def test_more_tokens_than_said_are_an_error_that_names_layer_and_remedy():
    model = linears()
    batches = MicroBatches(model, 32)
    batches.begin(0)
    model(torch.randn(48, 32)).sum().backward()
    with pytest.raises(ValueError, match=r"got 32, and 0 has read 48, .* Pass max_tokens=48\."):
        batches.begin(0)


def test_a_layer_that_is_called_twice_needs_room_for_both():
    model = linears()
    batches = MicroBatches(model, 32)
    batches.begin(0)
    (model(torch.randn(32, 32)) + model(torch.randn(32, 32))).sum().backward()
    with pytest.raises(ValueError, match="max_tokens=64"):
        batches.begin(1)


def test_evaluation_between_micro_batches_needs_no_room():
    model = linears()
    batches = MicroBatches(model, 32)
    batches.begin(0)
    model(torch.randn(32, 32)).sum().backward()
    model.eval()
    with torch.no_grad():
        model(torch.randn(512, 32))
    batches.begin(1)


@pytest.mark.parametrize("tokens", [0, -16, 2.0, True, None], ids=repr)
def test_a_wrong_number_of_tokens_is_refused(tokens):
    with pytest.raises(ValueError, match=r"max_tokens must be a positive int, got .* longest sequence"):
        MicroBatches(linears(), tokens)


def test_a_model_without_quantized_layers_warns_and_trains():
    model = linears("bf16")
    with pytest.warns(UserWarning, match=r"no quantized layer, .* fourbits\.convert"):
        batches = MicroBatches(model, 32)
    batches.begin(0)
    batches.begin(1)
