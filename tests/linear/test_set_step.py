"""Random bits are a function of (seed, step, layer, token), and of nothing else."""

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourbits.linear import sr_counter
from fourbits.linear.convert import convert
from fourbits.linear.layer_state import converted_state
from fourbits.linear.step import counters_of, set_step
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import KeepBF16
from support.assertions import assert_same_bytes
from support.straight_through import RunPosition, grad_of, linears, wgrad


@pytest.fixture(autouse=True)
def not_told_yet(monkeypatch):
    monkeypatch.setattr(sr_counter, "_warned", [])


def converted(layers: int = 1, seed: int = 0, recipe: str = "nvfp4") -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(layers)])
    with torch.no_grad():
        for index, linear in enumerate(linears(model)):
            linear.weight.copy_(torch.randn(32, 32, generator=torch.Generator().manual_seed(index)))
    convert(model, recipe, seed=seed)
    return model


def gradients(linear: nn.Linear, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(dX, dW) of one forward and backward."""
    linear.zero_grad()
    leaf = x.clone().requires_grad_()
    linear(leaf).backward(dy)
    return grad_of(leaf), grad_of(linear.weight).clone()


def batch(tokens: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, 32), torch.randn(tokens, 32)


def test_equal_seed_step_and_token_give_equal_bits():
    x, dy = batch()
    model = converted(seed=3)
    set_step(model, 5, 64)
    first = gradients(linears(model)[0], x, dy)
    set_step(model, 6, 0)
    gradients(linears(model)[0], x, dy)
    set_step(model, 5, 64)
    for got, want in zip(gradients(linears(model)[0], x, dy), first, strict=True):
        assert_same_bytes(got, want)


@pytest.mark.parametrize("change", ["seed", "step", "token", "layer"])
def test_another_seed_step_token_or_layer_gives_other_bits(change):
    x, dy = batch()

    def noise(seed=0, step=0, token=0, layer=0):
        model = converted(layers=2, seed=seed)
        set_step(model, step, token)
        linears(model)[layer].weight.data = linears(model)[0].weight.data
        return gradients(linears(model)[layer], x, dy)

    for base, changed in zip(noise(), noise(**{change: 16 if change == "token" else 1}), strict=True):
        assert not torch.equal(base, changed)


@pytest.mark.parametrize("splits", [[64], [32, 32], [16, 48], [16, 16, 16, 16]], ids=str)
def test_operands_of_a_split_micro_batch_are_slices_of_the_whole(splits):
    """With an equal amax in every part, bytes are equal; along the tokens as rows and as the contraction."""
    dy = torch.randn(64, 48).clamp(-2, 2)
    dy[::16, 0] = 2.0
    rows, summed = OperandSpec(rounding="sr"), OperandSpec(rounding="sr", rht=0)
    position = RunPosition(seed=1, layer=4, step=9)
    whole_rows = quantize(dy, rows, 1, sr_key=position.sr_key("dgrad.lhs"))
    whole_summed = quantize(dy, summed, 0, sr_key=position.sr_key("wgrad.lhs"))
    start = 0
    for part in dy.split(splits):
        at = RunPosition(seed=1, layer=4, step=9, first_token=start)
        stop = start + len(part)
        got = quantize(part, rows, 1, sr_key=at.sr_key("dgrad.lhs"))
        assert_same_bytes(got.codes, whole_rows.codes[start:stop])
        assert_same_bytes(got.block_scale, whole_rows.block_scale[start:stop])
        got = quantize(part, summed, 0, sr_key=at.sr_key("wgrad.lhs"))
        assert_same_bytes(got.codes, whole_summed.codes[:, start // 2 : stop // 2])
        assert_same_bytes(got.block_scale, whole_summed.block_scale[:, start // 16 : stop // 16])
        start = stop


def test_gradients_of_a_split_micro_batch_are_those_of_the_whole():
    """Two equal halves have the amax of the whole, so only the noise could differ; and it may not.

    dX: equal rows. dW: the halves sum to the whole within the bound of FP32 accumulation.
    """
    half_x, half_dy = batch(32)
    model = converted()
    set_step(model, 2, 0)
    dx, dw = gradients(linears(model)[0], torch.cat((half_x, half_x)), torch.cat((half_dy, half_dy)))
    parts = []
    for first_token in (0, 32):
        set_step(model, 2, first_token)
        parts.append(gradients(linears(model)[0], half_x, half_dy))
    assert_same_bytes(torch.cat([part[0] for part in parts]), dx)
    assert not torch.equal(parts[0][0], parts[1][0])
    exact = wgrad(
        torch.cat((half_dy, half_dy)),
        torch.cat((half_x, half_x)),
        get_recipe("nvfp4").table,
        RunPosition(step=2),
    )
    exact.assert_near(dw)
    exact.assert_near(parts[0][1] + parts[1][1])
    assert ((parts[0][1] - parts[1][1]).abs() > exact.bound).any()


def test_a_precision_schedule_moves_no_stream_of_another_layer():
    """A layer's number is its place among all linears, quantized or not."""
    x, dy = batch()
    found = []
    for names in ((), ("0", "1")):
        model = converted(3, recipe="bf16")
        convert(model, replace(get_recipe("nvfp4"), keep_bf16=KeepBF16(names=names)))
        set_step(model, 1)
        found.append(gradients(linears(model)[2], x, dy))
    for got, want in zip(*found, strict=True):
        assert_same_bytes(got, want)


def test_without_set_step_noise_is_fresh_at_every_step_and_one_warning_says_what_that_cannot_give():
    x, dy = batch()
    first, second = linears(converted(layers=2))
    with pytest.warns(UserWarning, match="set_step was never called"):
        found = [gradients(first, x, dy)[0]]
    found += [gradients(first, x, dy)[0] for _ in range(3)]  # a second warning would be an error
    gradients(second, x, dy)
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


def test_without_set_step_the_noise_of_a_run_repeats():
    x, dy = batch()
    runs = []
    for _ in range(2):
        model = converted()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs.append([gradients(linears(model)[0], x, dy)[1] for _ in range(3)])
    for got, want in zip(*runs, strict=True):
        assert_same_bytes(got, want)


def test_without_set_step_a_backward_pass_keeps_the_noise_of_its_forward(monkeypatch):
    """Two forwards before two backwards: both belong to the step in which they began."""
    monkeypatch.setattr(sr_counter, "_warned", [True])
    x, dy = batch()
    found = []
    for order in (1, -1):
        (linear,) = linears(converted())
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [linear(leaf) for leaf in leaves]
        for y in outputs[::order]:
            y.backward(dy)
        found.append([grad_of(leaf) for leaf in leaves])
    for one, other in zip(*found, strict=True):
        assert_same_bytes(one, other)
    assert not torch.equal(*found[0]), "the second forward met other tokens"


def test_with_set_step_there_is_no_warning_and_a_backward_moves_nothing():
    x, dy = batch()
    model = converted()
    set_step(model, 0)
    (counter,) = counters_of(model)
    before = counter.tolist()
    first = gradients(linears(model)[0], x, dy)
    assert counters_of(model)[0] is counter
    assert counter.tolist() == before
    set_step(model, 0)
    for got, want in zip(gradients(linears(model)[0], x, dy), first, strict=True):
        assert_same_bytes(got, want)


def test_a_layer_called_in_chunks_draws_the_bits_of_the_tokens_it_meets():
    """The rows of dY that are rounded for dX are those of the whole, 64 tokens after 32."""
    x, dy = batch(96)
    model = converted()
    (linear,) = linears(model)
    set_step(model, 3)
    whole = x.clone().requires_grad_()
    linear(whole).backward(dy)
    set_step(model, 3)
    chunks = [part.clone().requires_grad_() for part in x.split([32, 64])]
    amax = dy.abs().amax()
    outputs = [linear(chunk) for chunk in chunks]
    parts = [part.clone() for part in dy.split([32, 64])]
    for part in parts:
        part[0, 0] = amax  # one scale of the tensor for all parts
    dy[0, 0] = dy[32, 0] = amax
    for y, part in zip(outputs, parts, strict=True):
        y.backward(part)
    set_step(model, 3)
    whole = x.clone().requires_grad_()
    linear(whole).backward(dy)
    assert_same_bytes(torch.cat([grad_of(chunk) for chunk in chunks]), grad_of(whole))


def test_chunks_that_are_recomputed_repeat_their_bits():
    x, dy = batch(96)
    found = []
    for recompute in (False, True):
        model = converted()
        set_step(model, 3)
        leaf = x.clone().requires_grad_()

        def run(rows, model=model):
            return torch.cat([model(part) for part in rows.split(48)])

        y = checkpoint(run, leaf, use_reentrant=False) if recompute else run(leaf)
        y.backward(dy)
        found.append(grad_of(leaf))
    assert_same_bytes(*found)


def test_layers_that_join_or_replace_others_follow_the_steps_of_the_whole():
    model = converted(layers=2)
    set_step(model, 1)
    model.append(copy.deepcopy(model[0]))
    model[1] = copy.deepcopy(model[1])
    set_step(model, 5)
    layers: list[Any] = list(model)
    steps = [int(layer.quantization.counter_on(torch.device("cpu"))[1]) for layer in layers]
    assert steps == [5, 5, 5]


def test_parts_that_are_stepped_separately_stay_separate_inside_a_whole():
    parts = [converted(), converted()]
    for part in parts:
        set_step(part, 0)
    set_step(nn.ModuleList(parts), 1)
    set_step(parts[1], 2)
    assert [int(counters_of(part)[0][1]) for part in parts] == [1, 2]


def test_calls_without_gradients_do_not_move_those_with():
    x, dy = batch()
    found = []
    for evaluations in (0, 3):
        model = converted()
        set_step(model, 3)
        with torch.no_grad():
            for _ in range(evaluations):
                model(x)
        found.append(gradients(linears(model)[0], x, dy)[0])
    assert_same_bytes(*found)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_chunks_that_are_recomputed_one_by_one_draw_different_bits(reentrant):
    """Backward recomputes the last chunk first, so that chunks may change their bits among them."""
    x, dy = batch(48)
    model = converted()
    set_step(model, 3)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [checkpoint(model, leaf, use_reentrant=reentrant) for leaf in leaves]
    torch.cat(outputs).backward(torch.cat([dy, dy]))
    assert not torch.equal(grad_of(leaves[0]), grad_of(leaves[1]))


def test_a_step_costs_no_walk_over_the_modules(monkeypatch):
    model = converted(layers=3)
    set_step(model, 0)
    monkeypatch.setattr(nn.Module, "modules", lambda self: pytest.fail("walked over the modules"))
    set_step(model, 1)
    monkeypatch.undo()
    convert(model, "nvfp4", seed=9)
    set_step(model, 2)
    assert [counter.tolist()[:2] for counter in counters_of(model)] == [[9, 2]], "a new conversion is seen"


def test_set_step_between_forward_and_backward_does_not_reach_the_running_micro_batch():
    x, dy = batch()
    model = converted()
    set_step(model, 0)
    expected = gradients(linears(model)[0], x, dy)
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    set_step(model, 0)
    y = model(leaf)
    set_step(model, 1)
    y.backward(dy)
    assert_same_bytes(grad_of(leaf), expected[0])
    assert_same_bytes(grad_of(linears(model)[0].weight), expected[1])


@pytest.mark.parametrize("counted", [True, False], ids=["set_step", "own counter"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_recomputed_activations_draw_the_same_bits(counted, reentrant):
    x, dy = batch()
    runs = []
    for recompute in (False, True):
        model = converted(layers=3)
        if counted:
            set_step(model, 4)
        leaf = x.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            y = checkpoint(model, leaf, use_reentrant=reentrant) if recompute else model(leaf)
            y.backward(dy)
        runs.append([y.detach(), grad_of(leaf), *(grad_of(p) for p in model.parameters())])
    for got, want in zip(*runs, strict=True):
        assert_same_bytes(got, want)


@pytest.mark.parametrize(
    ("step", "first_token", "text"),
    [
        (-1, 0, r"step must be in \[0, 2\*\*32\), got -1"),
        (1 << 32, 0, "step must be in"),
        (0, -16, r"first_token must be in \[0, 2\*\*62\), got -16\. Count the tokens of a step from 0"),
        (0, 1 << 64, r"first_token must be in \[0, 2\*\*62\), got 18446744073709551616"),
    ],
)
def test_an_invalid_step_is_refused(step, first_token, text):
    with pytest.raises(ValueError, match=text):
        set_step(converted(), step, first_token)


@pytest.mark.parametrize("lengths", [[111, 111, 111], [17] * 6, [5, 5, 16, 1], [16, 64, 32]], ids=str)
def test_micro_batches_of_any_length_share_no_block_of_noise(lengths):
    model, first, taken = converted(), 0, []
    for length in lengths:
        set_step(model, 1, first_token=first)
        (counter,) = counters_of(model)
        place = int(counter[2])
        assert place % 16 == 0
        assert place >= first
        taken += range(place // 16, (place + length + 15) // 16)
        first += length
    assert len(set(taken)) == len(taken)


def test_a_first_token_is_rounded_up_and_multiples_of_16_stay():
    model = converted()
    for step, first, place in ((0, 111, 112), (1, 0, 0), (1, 64, 64), (1, 32, 32), (2, 48, 48)):
        set_step(model, step, first_token=first)
        assert [counter.tolist()[:5] for counter in counters_of(model)] == [[0, step, place, place // 16, 0]]


def test_parts_converted_one_by_one_share_no_noise_and_those_converted_at_once_keep_their_numbers():
    def numbers(model: nn.Module) -> list[int]:
        states = (converted_state(module) for module in model.modules())
        return [state.layer for state in states if state is not None]

    whole = nn.ModuleDict(
        {"encoder": nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "decoder": nn.Linear(32, 32)}
    )
    for part in whole.children():
        convert(part, "nvfp4")
    assert numbers(whole) == [0, 1, 0]
    for _ in range(2):
        set_step(whole, 0)
        assert numbers(whole) == [0, 1, 2]
    x, dy = batch()
    whole["decoder"].load_state_dict(whole["encoder"][0].state_dict())  # pyright: ignore
    found = [gradients(linear, x, dy) for linear in (whole["encoder"][0], whole["decoder"])]  # pyright: ignore
    assert not torch.equal(found[0][0], found[1][0])
    convert(whole, "nvfp4")
    set_step(whole, 0)
    assert numbers(whole) == [0, 1, 2]
