"""A user's own model under a precision schedule: set_step moves its layers through the phases."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourbits import PrecisionPhase, Recipe, audit, convert, set_recipe, set_step, set_weight_source
from fourbits.integrations.checkpoint import restore_run_state, run_state
from fourbits.linear.amax_policy import COUNT, HISTORY, OPERANDS
from fourbits.linear.checkpoint_state import recipe_state, recipe_states_of
from fourbits.linear.step import counters_of, stage_of
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.schedule import Stage
from fourbits.settings import override
from support.assertions import assert_same_bytes
from support.straight_through import ROLES, grad_of

SWITCH = 3
WHOLE = {"keep_bf16.first_blocks": 0, "keep_bf16.last_blocks": 0}
LATE = PrecisionPhase(name="late", start=SWITCH, gemms="forward")
START = PrecisionPhase(name="start", end=SWITCH)


def recipe_of(*phases: PrecisionPhase, **changes: Any) -> Recipe:
    return replace(override(get_recipe("nvfp4"), {**WHOLE, **changes}), schedule=phases)


def model_of(recipe: Recipe | str | None) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32, bias=False)).bfloat16()
    if recipe is not None:
        convert(model, recipe, seed=7)
    return model


def results(model: nn.Module, step: int, call: Any = None) -> list[Tensor]:
    """Output, dX and gradients of a step."""
    set_step(model, step)
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(step)).bfloat16().requires_grad_()
    model.zero_grad()
    y = (call or model)(x)
    y.square().sum().backward()
    return [y.detach(), grad_of(x), *(grad_of(p).clone() for p in model.parameters())]


def train(model: nn.Module, steps: range) -> list[list[Tensor]]:
    found = []
    for step in steps:
        found.append(results(model, step))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-4 * grad_of(parameter)
    return found


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for got, want in zip(actual, expected, strict=True):
        assert_same_bytes(got, want)


def differ(a: list[Tensor], b: list[Tensor]) -> list[bool]:
    return [not torch.equal(one, other) for one, other in zip(a, b, strict=True)]


def test_a_phase_in_bf16_has_the_bits_of_the_plain_model_and_the_next_those_of_the_recipe():
    model, plain, quantized = (model_of(r) for r in (recipe_of(START), "bf16", recipe_of()))
    assert_equal(results(model, SWITCH - 1), results(plain, SWITCH - 1))
    assert_equal(results(model, SWITCH), results(quantized, SWITCH))
    assert any(differ(results(model, SWITCH), results(plain, SWITCH)))
    assert_equal(results(model, 0), results(plain, 0))  # and back


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("gemms", ["forward", "backward", "dgrad", "both"])
def test_a_late_switch_has_the_bits_of_a_recipe_with_these_gemms(gemms, precision):
    phase = replace(LATE, gemms=gemms, precision=precision)
    other = get_recipe(precision)
    expected = replace(recipe_of(), **{name: getattr(other, name) for name in phase.affected})
    model = model_of(recipe_of(phase))
    assert_equal(results(model, SWITCH - 1), results(model_of(recipe_of()), SWITCH - 1))
    assert_equal(results(model, SWITCH), results(model_of(expected), SWITCH))


def test_a_phase_of_some_layers_leaves_the_others():
    model = model_of(recipe_of(replace(LATE, layers=("2",), gemms="both")))
    set_step(model, SWITCH)
    assert [model[0].quantization.plain, model[2].quantization.plain] == [False, True]
    first = model[0].quantization.table
    set_step(model, 0)
    assert model[0].quantization.table == first
    assert not model[2].quantization.plain


@pytest.mark.parametrize("stop", [SWITCH - 1, SWITCH, SWITCH + 1])
@pytest.mark.parametrize("phase", [START, LATE, replace(LATE, blend_in=2)], ids=["start", "late", "blend"])
def test_a_run_resumed_before_at_or_after_a_switch_has_equal_bits(phase, stop):
    whole = train(model_of(recipe_of(phase)), range(6))
    first = model_of(recipe_of(phase))
    train(first, range(stop))
    resumed = model_of(recipe_of(phase))
    resumed.load_state_dict(first.state_dict())
    restore_run_state(resumed, run_state(first))
    for got, expected in zip(train(resumed, range(stop, 6)), whole[stop:], strict=True):
        assert_equal(got, expected)


def history_of(*phases: PrecisionPhase) -> Recipe:
    policies = {f"{r}.{k}": v for r in ROLES for k, v in (("amax_policy", "history"), ("amax_history", 4))}
    return recipe_of(*phases, **policies)


def test_a_switch_keeps_the_histories_of_the_gemms_that_stay():
    model = model_of(history_of(LATE))
    train(model, range(SWITCH))
    (before,) = recipe_states_of(model)
    amaxes, counters = before.amaxes.clone(), before.counters.clone()
    set_step(model, SWITCH)
    (after,) = recipe_states_of(model)
    for role, name in enumerate(OPERANDS):
        if name.startswith("fprop"):
            assert after.counters[:, role, COUNT].eq(0).all()
        else:  # the last step's observation is committed on top of those of earlier ones
            kept = (
                OPERANDS.index("fprop.rhs") if name == "dgrad.rhs" else role
            )  # W was quantized once for both
            assert after.counters[:, role, COUNT].eq(counters[:, kept, COUNT] + 1).all()
            assert_same_bytes(after.amaxes[:, role, HISTORY + 1 :], amaxes[:, kept, HISTORY:-1])


@pytest.mark.parametrize("stop", [SWITCH, SWITCH + 1])
def test_a_resume_at_a_switch_has_the_histories(stop):
    recipe = history_of(LATE)
    whole = train(model_of(recipe), range(6))
    first = model_of(recipe)
    train(first, range(stop))
    resumed = model_of(recipe)
    resumed.load_state_dict(first.state_dict())
    restore_run_state(resumed, run_state(first))
    assert {k: v.tolist() for k, v in recipe_state(resumed).items()} == {
        k: v.tolist() for k, v in recipe_state(first).items()
    }
    assert_equal(train(resumed, range(stop, 6))[0], whole[stop])


def test_set_recipe_enters_the_phase_of_the_last_step():
    model = model_of(history_of(LATE))
    train(model, range(SWITCH + 2))
    set_recipe(model, history_of(replace(LATE, name="again")))
    assert model[0].quantization.numbering.stage == Stage((0,), ())
    expected = model_of(history_of(LATE))
    train(expected, range(SWITCH + 2))
    assert_equal(results(model, SWITCH + 2), results(expected, SWITCH + 2))


def test_a_switch_compiles_once_and_steps_compile_nothing():
    phases = START, replace(LATE, start=SWITCH + 3, precision="mxfp8")
    model, eager = model_of(recipe_of(*phases)), model_of(recipe_of(*phases))
    torch.compiler.reset()
    graphs = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    found = []
    for step in range(SWITCH + 6):
        assert_equal(results(model, step, compiled), results(eager, step))
        found.append(graphs)
    assert found == [1] * SWITCH + [2] * 3 + [3] * 3
    assert_equal(results(model, 0, compiled), results(eager, 0))
    assert graphs == 3  # the graph of an earlier phase is still known
    torch.compiler.reset()


@pytest.mark.parametrize("gemms", ["both", "forward"])
def test_a_blend_is_the_weighted_mean_of_outputs_and_gradients_and_its_steps_compile_nothing(gemms):
    phase = replace(LATE, gemms=gemms, blend_in=3)
    model, before = model_of(recipe_of(phase)).float(), model_of(recipe_of()).float()
    after = model_of(recipe_of(replace(phase, start=0, blend_in=0))).float()
    layer, parts = model[2], (before[2], after[2])
    x, dy = torch.randn(32, 48), torch.randn(32, 32)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for step, share in ((SWITCH, 0.25), (SWITCH + 1, 0.5), (SWITCH + 2, 0.75)):
        for each in (model, before, after):
            set_step(each, step)
        assert stage_of(model) == (Stage((), (0,)),)
        assert float(counters_of(model)[-1]) == share
        y, y_before, y_after = (each(x) for each in (layer, *parts))
        torch.testing.assert_close(y, torch.lerp(y_before, y_after, share))
        layer.zero_grad()
        y.backward(dy)
        wgrads = []
        for each in (before, after):
            set_step(each, step)  # the second call of a micro-batch would draw other bits
        for part, weight in zip(parts, (1 - share, share), strict=True):
            part.zero_grad()
            part(x).backward(dy * weight)
            wgrads.append(grad_of(part.weight))
        torch.testing.assert_close(grad_of(layer.weight), wgrads[0] + wgrads[1])
        with torch.compiler.set_stance("default" if step == SWITCH else "fail_on_recompile"):
            assert_same_bytes(compiled(x).detach(), y.detach())
    torch.compiler.reset()


def test_copies_and_saved_models_stay_in_their_phase():
    model = model_of(recipe_of(replace(LATE, blend_in=2)))
    results(model, SWITCH)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal(results(other, SWITCH), results(model, SWITCH))
        assert_equal(results(other, SWITCH + 1), results(model, SWITCH + 1))
        set_step(model, SWITCH)


def test_an_audit_claims_nothing_of_layers_in_bf16_and_finds_bypassed_ones_after_the_switch():
    model = model_of(recipe_of(START))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    results(model, 0)
    report = audit(model)
    assert (report.called, report.bypassed, report.unused, report.in_bf16) == ((), (), (), ("0", "2"))
    assert (report.claimed_share, report.called_share) == (1.0, 0.0)
    assert report.phases == ("phase start of the schedule: forward and backward in bf16, 2 layers",)
    assert "in BF16 by a phase 2 quantized layers" in str(report)
    assert f"\n  {report.phases[0]}" in str(report)
    optimizer.step()

    def bypassing(x: Tensor) -> Tensor:
        return nn.functional.linear(model[1](model[0](x)), model[2].weight)

    results(model, SWITCH, bypassing)
    report = audit(model)
    assert (report.called, report.bypassed, report.in_bf16, report.phases) == (("0",), ("2",), (), ())
    with pytest.warns(UserWarning, match=r"high precision \(2\)"):
        optimizer.step()


def test_an_audit_names_a_phase_that_changes_some_gemms_or_layers():
    model = model_of(recipe_of(LATE, replace(START, layers=("0",))))
    results(model, 0)
    report = audit(model)
    assert (report.called, report.in_bf16) == (("2",), ("0",))
    assert report.phases == ("phase start of the schedule: forward and backward of 0 in bf16, 1 layer",)
    results(model, SWITCH)
    report = audit(model)
    assert (report.called, report.in_bf16) == (("0", "2"), ())
    assert report.phases == ("phase late of the schedule: forward in bf16, 2 layers",)


def test_a_summary_lists_phases_and_evaluation_follows_them():
    model = model_of(None)
    summary = convert(model, recipe_of(replace(LATE, gemms="both"), replace(START, layers=("0",))))
    assert "phase late, from step 3 on: forward and backward in bf16, 2 quantized layers" in str(summary)
    assert "phase start, from step 0 to 3: forward and backward of 0 in bf16, 1 quantized layer" in str(
        summary
    )
    plain, x = model_of(None).eval(), torch.randn(16, 32).bfloat16()
    set_step(model.eval(), SWITCH)
    assert_same_bytes(model(x).detach(), plain(x).detach())


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (recipe_of(replace(LATE, start=0.5)), r"phase 'late' depends on the length.*recipe.for_run\("),
        (
            recipe_of(replace(LATE, start="decay-start")),
            r"recipe.for_run\(steps=..., warmup=",
        ),
        (
            recipe_of(replace(LATE, layers=("*.nothing",))),
            "schedule.layers must match a linear",
        ),
        (
            recipe_of(replace(LATE, layers=("0",)), **{"keep_bf16.names": ("0",)}),
            "phase 'late' must match a quant",
        ),
        (recipe_of(replace(LATE, precision="mxfp9")), "must be bf16 or a shipped recipe, got 'mxfp9'"),
        (
            recipe_of(replace(LATE, layers=("0",)), replace(START, end=9, layers=("[0-9]",))),
            "must not overlap in fprop of '0'",
        ),
        (history_of(replace(LATE, blend_in=2)), "phase 'late' blends, which '0' does not support"),
    ],
)
def test_convert_refuses_a_schedule_that_cannot_work(recipe, message):
    model = model_of(None)
    with pytest.raises(ValueError, match=message) as error:
        convert(model, recipe)
    assert "\n" not in str(error.value)
    assert type(model[0]) is nn.Linear


def test_a_weight_that_arrives_quantized_has_no_schedule():
    model = model_of(recipe_of(LATE))
    with pytest.raises(ValueError, match="a phase of the recipe's schedule may need the unquantized weight"):
        set_weight_source(model[0], lambda weight: pytest.fail("never called"))
    other = model_of(recipe_of())
    set_weight_source(other[0], lambda weight: pytest.fail("never called"))
    with pytest.raises(ValueError, match="cannot follow a schedule"):
        set_recipe(other, recipe_of(LATE))


def test_parts_of_a_model_enter_a_phase_together():
    """They share one numbering, whose stage the first part must not take from the others."""
    parts: list[Any] = [nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 32))]
    convert(parts, recipe_of(LATE))
    before = [part[0].quantization.table for part in parts]
    set_step(parts, SWITCH - 1)
    assert [part[0].quantization.table for part in parts] == before
    set_step(parts, SWITCH)
    after = [part[0].quantization.table for part in parts]
    assert after[0] == after[1] != before[0]


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        (PrecisionPhase(name="empty", start=5, end=5), "phase 'empty' has no step: it begins at step 5"),
        (PrecisionPhase(name="back", start=5, end=3), "phase 'back' has no step"),
        (
            PrecisionPhase(name="long", start=1, end=3, blend_in=3),
            "must be at least as long as its blends, got blend_in 3",
        ),
        (
            PrecisionPhase(name="open", start=1, blend_out=2),
            "must be at least as long as its blends, .* without an end",
        ),
    ],
)
def test_a_phase_with_impossible_steps_is_refused_by_convert(phase, message):
    with pytest.raises(ValueError, match=message):
        convert(nn.Sequential(nn.Linear(32, 32)), recipe_of(phase))


@pytest.mark.parametrize("layers", ["*.wq", (5,)])
def test_layers_of_a_phase_are_a_list_of_patterns(layers):
    with pytest.raises(ValueError, match="layers must be a list of patterns of layer names, got"):
        PrecisionPhase(name="x", layers=layers)


@pytest.mark.parametrize("shape", [{"decay": 20}, {"warmup": -1}, {"warmup": 20}, {"steps": 0}])
def test_a_run_has_room_for_its_warmup_and_decay(shape):
    with pytest.raises(ValueError, match=r"for_run: .* at most the steps of the run, got"):
        recipe_of(LATE).for_run(shape.get("steps", 10), shape.get("warmup", 0), shape.get("decay", 0))


def test_the_stage_of_parts_is_that_of_the_model():
    parts: list[Any] = [nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 32))]
    convert(parts, recipe_of(LATE))
    set_step(parts, SWITCH)
    assert stage_of(parts) == (Stage(full=(0,)),)
