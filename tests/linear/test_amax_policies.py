"""Amax policies: what a step uses, what it observes, and that the state is the run's and nothing else's."""

import copy
import struct
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourbits.linear import sr_counter
from fourbits.linear.amax_history import RecipeState
from fourbits.linear.amax_policy import COUNT, HISTORY, IN_USE, observe
from fourbits.linear.checkpoint_state import load_recipe_state, recipe_state
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import GemmSpec, GemmTable, Recipe
from fourbits.settings import override
from oracle import policies
from oracle.spec import Spec
from support.assertions import assert_same_bytes
from support.straight_through import ROLES, RunPosition, dgrad, fprop, grad_of, linears, wgrad

POLICIES: dict[str, dict[str, Any]] = {
    "delayed": {"amax_policy": "delayed"},
    "delayed with headroom": {"amax_policy": "delayed", "amax_headroom": 1.25},
    "interval": {"amax_policy": "interval", "amax_interval": 3},
    "history": {"amax_policy": "history", "amax_history": 3},
    "history with headroom": {"amax_policy": "history", "amax_history": 4, "amax_headroom": 0.5},
}


def bits(x: float) -> int:
    """Pattern of an fp32 number."""
    return struct.unpack("<I", struct.pack("<f", x))[0]


def with_policy(recipe: Recipe, policy: dict[str, Any]) -> Recipe:
    """The recipe everywhere, with an amax policy on all six operands."""
    changes = {f"{role}.{key}": value for role in ROLES for key, value in policy.items()}
    return override(recipe, {**changes, "keep_bf16.first_blocks": 0, "keep_bf16.last_blocks": 0})


def converted(recipe: str = "nvfp4", layers: int = 1, **policy: Any) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(layers)])
    convert(model, with_policy(get_recipe(recipe), policy), seed=1)
    return model


def run(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dX and the gradients of one micro-batch."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(dy)
    return [y.detach(), grad_of(leaf), *(grad_of(p).clone() for p in model.parameters())]


def batches(count: int, tokens: int = 32) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches whose magnitudes wander."""
    scales = [2.0 ** ((7 * i) % 5 - 2) for i in range(count)]
    return [(s * torch.randn(tokens, 32), s * torch.randn(tokens, 32)) for s in scales]


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert_same_bytes(actual[key], value, key)


# a sequence of steps: which step, and the maxima that its micro-batches observe (inf is not observed)
SEQUENCE = [
    (0, [1.5, 0.25]), (1, [3.0]), (2, [0.5, 0.75]), (3, []), (4, [float("inf"), 2.0]), (5, [float("nan")]),
    (6, [0.0]), (7, [6.0]), (7, [8.0]), (9, [1e-45]), (10, [3e38]), (12, [1.0]), (11, [7.0]), (12, [5.0]),
    (13, []),
]  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_the_recipe_state_follows_the_written_rule_step_by_step(name):
    """Against the oracle, for every step of a run that repeats, skips and goes back."""
    spec, operand = Spec(**POLICIES[name]), OperandSpec(**POLICIES[name])
    tracked = RecipeState([GemmTable(), GemmTable(wgrad=GemmSpec(lhs=operand))])
    slot, role, state, last = 1, 4, policies.AmaxState(), None
    for step, maxima in SEQUENCE:
        if last is not None and step > last:
            state = policies.commit(state, spec)
        elif last is not None and step < last:
            state = policies.AmaxState(state.history)
        tracked.advance(step, None)
        last = step
        for own in maxima:
            used, observed = policies.amax_used(state, spec, step, bits(own))
            found = tracked.amaxes[slot, role, IN_USE].item()
            assert (bits(own) if found < 0 else bits(found)) == used
            note = own if observed else float("nan")
            backward = torch.tensor([float("nan"), float("nan"), note, float("nan")])
            observe(tracked.amaxes, tracked.counters, backward, torch.zeros(4, 4, dtype=torch.int64), slot, 2)
            if observed:
                state = policies.observe(state, bits(own))
        count = int(tracked.counters[slot, role, COUNT])
        history = tracked.amaxes[slot, role, HISTORY : HISTORY + count].tolist()
        assert [bits(amax) for amax in history] == list(state.history)
    assert (tracked.counters[0] == 0).all()


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-naive", "quartet2", "nvfp4-46"])
def test_a_step_uses_the_amax_of_the_step_before_on_every_operand(recipe):
    """Wherever both are quantized with that amax given, the products are equal."""
    model = converted(recipe, amax_policy="delayed")
    linear, table = linears(model)[0], with_policy(get_recipe(recipe), {"amax_policy": "delayed"}).table
    (first, later) = batches(2)
    set_step(model, 0)
    run(model, *first)
    set_step(model, 1)
    history = recipe_state(model)["0.history"][:, 0]
    shared = table.shares_weight
    amaxes = {role: history[i] for i, role in enumerate(ROLES) if not (shared and role == "dgrad.rhs")}
    position = RunPosition(seed=1, step=1, amaxes=amaxes)
    y, dx, dw = run(model, *later)
    weight = linear.weight.detach()
    fprop(later[0], weight, None, table, position).assert_near(y)
    dgrad(later[1], weight, table, position).assert_near(dx)
    wgrad(later[1], later[0], table, position).assert_near(dw)
    own = fprop(later[0], weight, None, table, replace(position, amaxes={}))
    assert ((y.double() - own.value).abs() > own.bound).any()


@pytest.mark.parametrize("name", POLICIES)
def test_the_first_step_is_that_of_current(name):
    x, dy = batches(1)[0]
    model, current = converted(**POLICIES[name]), converted()
    for m in (model, current):
        set_step(m, 0)
    for got, want in zip(run(model, x, dy), run(current, x, dy), strict=True):
        assert_same_bytes(got, want)


def test_every_micro_batch_of_a_step_uses_one_amax_and_adds_to_one_maximum():
    model, parts = converted(amax_policy="delayed"), batches(3)
    set_step(model, 0)
    for x, dy in parts:
        run(model, x, dy)
    assert recipe_state(model)["0.count"].tolist() == [0] * 6
    set_step(model, 1)
    state = recipe_state(model)
    assert state["0.history"][0, 0] == max(x.abs().max() for x, _ in parts)
    assert state["0.history"][2, 0] == max(dy.abs().max() for _, dy in parts)
    assert state["0.count"].tolist() == [1, 1, 1, 0, 1, 1]  # Dgrad multiplies Fprop's W
    set_step(model, 1, first_token=32)
    assert_same_state(recipe_state(model), state)


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode", "eval with gradients"])
def test_evaluation_uses_the_state_and_changes_nothing_in_it(mode):
    model, (first, later) = converted(amax_policy="delayed"), batches(2)
    set_step(model, 0)
    run(model, *first)
    set_step(model, 1)
    before = recipe_state(model)
    trained = model(later[0]).detach()
    load_recipe_state(model, before)
    if mode.startswith("eval"):
        model.eval()
        y = run(model, *later)[0] if mode.endswith("gradients") else model(later[0]).detach()
    else:
        with getattr(torch, mode)():
            y = model(later[0])
    assert_same_bytes(y.clone(), trained)
    assert_same_state(recipe_state(model), before)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_recomputation_leaves_the_state_of_a_run_that_keeps_its_activations(reentrant):
    runs = []
    for recompute in (False, True):
        model, states = converted(layers=2, amax_policy="history", amax_history=2), []
        for step, (x, dy) in enumerate(batches(3)):
            set_step(model, step)
            leaf = x.clone().requires_grad_()
            y = checkpoint(model, leaf, use_reentrant=reentrant) if recompute else model(leaf)
            y.backward(dy)
            states += [y.detach(), grad_of(leaf), recipe_state(model)]
        runs.append(states)
    for got, want in zip(*runs, strict=True):
        if not isinstance(want, dict):
            assert_same_bytes(got, want)
            continue
        counts = [key for key in want if reentrant and key.endswith(("saturated", "blocks"))]
        assert_same_state({**got, **{key: want[key] for key in counts}}, want)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("counted", [True, False], ids=["set_step", "own counter"])
def test_a_compiled_step_uses_and_leaves_the_state_of_an_eager_one(counted, monkeypatch):
    monkeypatch.setattr(sr_counter, "_warned", [True])
    torch.compiler.reset()
    eager, other = (converted(layers=2, amax_policy="delayed") for _ in range(2))
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for step, (x, dy) in enumerate(batches(3)):
        if counted:
            set_step(eager, step)
            set_step(other, step)
        expected = run(eager, x, dy)
        other.zero_grad()
        leaf = x.clone().requires_grad_()
        y = compiled(leaf)
        y.backward(dy)
        for got, want in zip([y, grad_of(leaf), *map(grad_of, other.parameters())], expected, strict=True):
            assert_same_bytes(got.detach(), want)
        assert_same_state(recipe_state(other), recipe_state(eager))


def test_a_resumed_run_continues_with_the_bits_of_one_that_was_not_stopped():
    """Saved between a backward and the next set_step, when the last maxima are not committed yet."""
    steps = batches(6)
    whole, outputs = converted(layers=2, amax_policy="history", amax_history=3), []
    saved: dict[str, Tensor] = {}
    for step, (x, dy) in enumerate(steps):
        set_step(whole, step)
        outputs.append(run(whole, x, dy))
        if step == 2:
            saved = recipe_state(whole)
    resumed = converted(layers=2, amax_policy="history", amax_history=3)
    load_recipe_state(resumed, saved)
    assert_same_state(recipe_state(resumed), saved)
    for step in (3, 4, 5):
        set_step(resumed, step)
        for got, want in zip(run(resumed, *steps[step]), outputs[step], strict=True):
            assert_same_bytes(got, want)
    assert_same_state(recipe_state(resumed), recipe_state(whole))


def test_the_state_is_not_in_the_state_dict_and_is_copied_with_the_model():
    model = converted(amax_policy="delayed")
    set_step(model, 0)
    run(model, *batches(1)[0])
    assert list(model.state_dict()) == ["0.weight"]
    nn.Sequential(nn.Linear(32, 32, bias=False)).load_state_dict(model.state_dict(), strict=True)
    other = copy.deepcopy(model)
    set_step(model, 1)
    assert recipe_state(other)["step"] == 0
    set_step(other, 1)
    assert_same_state(recipe_state(other), recipe_state(model))


def test_a_recipe_without_policies_has_no_state():
    model = converted()
    set_step(model, 0)
    assert recipe_state(model) == {}
    load_recipe_state(model, {})


def test_converting_again_begins_a_new_state():
    model = converted(amax_policy="delayed")
    set_step(model, 0)
    run(model, *batches(1)[0])
    set_step(model, 1)
    convert(model, with_policy(get_recipe("nvfp4"), {"amax_policy": "delayed"}))
    assert recipe_state(model)["0.count"].sum() == 0


@pytest.mark.parametrize("policy", [{}, {"amax_policy": "history", "amax_history": 5}])
def test_the_state_of_another_recipe_is_refused(policy):
    state = recipe_state(converted(amax_policy="delayed"))
    with pytest.raises(
        ValueError, match=r"load_recipe_state: .* does not fit .* Convert the model with the recipe"
    ):
        load_recipe_state(converted(**policy), state)


def test_a_stale_amax_saturates_and_is_counted():
    """X has 64 blocks, along K and along M. Ten times larger than the amax in use, all of them saturate."""
    model, ones = converted(amax_policy="delayed"), torch.ones(32, 32)
    set_step(model, 0)
    run(model, ones, ones)
    set_step(model, 1)
    y, *_ = run(model, 10 * ones, ones)
    model(10 * ones.requires_grad_())
    with torch.no_grad():
        model(10 * ones)
    state = recipe_state(model)
    assert state["0.saturated"].tolist() == [2 * 64, 0, 0, 0, 0, 64]
    assert state["0.blocks"].tolist() == [3 * 64, 3 * 4, 2 * 64, 0, 2 * 64, 2 * 64]
    weight = linears(model)[0].weight
    quantized = fprop(ones.detach(), weight.detach(), None, get_recipe("nvfp4").table, RunPosition(seed=1))
    quantized.assert_near(y)  # clamped to the amax of the step before


def test_ue5m3_scales_have_room_for_137_times_a_held_amax():
    """Measured every 50 steps. 137 * 448 is below the largest scale, 142 * 448 would round above."""
    model, ones = converted("ue5m3"), torch.ones(32, 32)
    for step, factor, saturated in ((0, 1.0, 0), (1, 137.0, 0), (49, 142.0, 64), (50, 1000.0, 64)):
        set_step(model, step)
        y, *_ = run(model, factor * ones, ones)
        assert recipe_state(model)["0.saturated"].tolist() == [saturated, 0, 0, 0, 0, saturated]
    weight = quantize(linears(model)[0].weight.detach(), get_recipe("ue5m3").fprop.rhs).dequantize()
    torch.testing.assert_close(y, 1000.0 * ones @ weight.t(), rtol=1e-5, atol=1e-3)


def test_whole_tensor_blocks_count_elements():
    spec = OperandSpec(format="fp8", block=(0, 0), amax_policy="delayed")
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    convert(model, Recipe(name="fp8 delayed", fprop=GemmSpec(lhs=spec)))
    x = torch.full((16, 32), 1.0)
    set_step(model, 0)
    model(x.requires_grad_())
    set_step(model, 1)
    x = x.detach().clone()
    x[0, :5] = 1.04  # 464 is 1.0357 times 448
    x[1, :7] = 1.03
    model(x.requires_grad_())
    state = recipe_state(model)
    assert state["0.saturated"].tolist() == [5, 0, 0, 0, 0, 0]
    assert state["0.blocks"].tolist() == [2 * 512, 0, 0, 0, 0, 0]


def test_without_set_step_each_backward_commits_its_own_layer():
    model, (x, dy) = converted(layers=2, amax_policy="history", amax_history=2), batches(1)[0]
    first = linears(model)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for scale in (1.0, 2.0, 4.0):
            first(scale * x.requires_grad_()).backward(dy)
    state = recipe_state(model)
    assert state["0.history"][0].tolist() == [4 * x.abs().max(), 2 * x.abs().max()]
    assert state["0.count"].tolist() == [2, 2, 2, 0, 2, 2]
    assert state["1.count"].sum() == 0


def test_a_backward_pass_keeps_what_its_forward_used():
    model, (first, later) = converted(amax_policy="delayed"), batches(2)
    set_step(model, 0)
    run(model, *first)
    set_step(model, 1)
    expected = run(model, *later)
    load_recipe_state(model, {**recipe_state(model), "step": torch.tensor(1)})
    leaf = later[0].clone().requires_grad_()
    model.zero_grad()
    set_step(model, 1)
    y = model(leaf)
    set_step(model, 2)
    y.backward(later[1])
    assert_same_bytes(grad_of(leaf), expected[1])


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_an_evaluation_in_inference_mode_before_training_changes_no_bit(policy):
    found = []
    for evaluates in (False, True):
        model = converted(layers=2, **policy)
        if evaluates:
            with torch.inference_mode():
                set_step(model, 0)
                model.eval()(torch.ones(16, 32))
                load_recipe_state(model, recipe_state(model))
            model.train()
        outputs: list[Tensor] = []
        for step, (x, dy) in enumerate(batches(3)):
            set_step(model, step)
            outputs += run(model, x, dy)
        found.append(outputs)
    for got, want in zip(*found, strict=True):
        assert_same_bytes(got, want)
