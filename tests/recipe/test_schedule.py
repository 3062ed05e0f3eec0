"""Precision schedules as data: points become steps, and what cannot work is refused in one line."""

from dataclasses import replace
from typing import Any

import pytest

from fourbits import PrecisionPhase, Recipe, get_recipe, list_recipes
from fourbits.recipe.presets import RECIPES, recipe_from_mapping
from fourbits.recipe.schedule import Stage, stage_at
from fourbits.recipe.schedules import SCHEDULES, is_plain, with_phases
from fourbits.settings import build, dump_yaml, override, to_dict
from fourbits.yaml_text import parse_yaml


def scheduled(*phases: PrecisionPhase, base: str = "nvfp4") -> Recipe:
    return replace(get_recipe(base), schedule=phases)


def phase(name: str = "p", **fields: Any) -> PrecisionPhase:
    return PrecisionPhase(name=name, **fields)


@pytest.mark.parametrize(
    ("start", "end", "first", "after"),
    [
        (3, "end", 3, None),
        (0, 40, 0, 40),
        (0.82, "end", 82, None),
        ("82%", "end", 82, None),
        ("8/62", "50%", 13, 50),  # 12.9 rounds to 13
        ("warmup-end", "decay-start", 5, 80),
        ("data-2", "data-3", 70, 90),
        ("decay-start", 100, 80, None),  # the last step and "end" are the same
    ],
)
def test_points_become_steps_of_a_run(start, end, first, after):
    run = scheduled(phase(start=start, end=end)).for_run(100, warmup=5, decay=20, data_starts=(70, 90))
    assert run.schedule[0].span == (first, after)
    assert run.for_run(100) == run


def test_a_stage_has_the_phases_of_a_step_and_their_weights():
    run = scheduled(phase("a", end=4, blend_out=2), phase("b", start=6, blend_in=1)).for_run(10)
    assert [stage_at(run.schedule, step) for step in (0, 2, 4, 6, 7, 99)] == [
        Stage((0,), ()),
        Stage((), (0,)),
        Stage((), ()),
        Stage((), (1,)),
        Stage((1,), ()),
        Stage((1,), ()),
    ]
    weights = [run.schedule[0].weight_at(step) for step in range(5)]
    assert weights == [1, 1, pytest.approx(2 / 3), pytest.approx(1 / 3), 0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"start": 100}, "must begin before the end of the run, got 100 of 100 steps"),
        ({"end": 101}, "must end within the run, got 101 of 100 steps"),
        ({"start": 50, "end": 50}, "has no step"),
        ({"start": "0.1%", "end": "0.2%"}, "has no step"),
        ({"start": "decay-start"}, "needs a decay of the learning rate"),
        ({"start": "data-2"}, "needs data phase 2, and the data has 1"),
        ({"end": 3, "blend_in": 2, "blend_out": 2}, "must be at least as long as its blends"),
        ({"blend_out": 1}, "without an end"),
    ],
)
def test_a_phase_that_does_not_fit_the_run_is_refused(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        scheduled(phase(**fields)).for_run(100)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gemms": "forwards"}, "gemms must be one of .*got 'forwards'. Did you mean 'forward'"),
        ({"gemms": ("fprop", "bprop")}, "gemms must be one of fprop, dgrad, wgrad, got 'bprop'"),
        ({"gemms": ()}, "got none"),
        ({"start": -1}, "start must be a step"),
        ({"start": 1.5}, "start must be a step"),
        ({"start": True}, "start must be a step"),
        ({"end": "decay"}, "end must be a step.*Did you mean 'decay-start'"),
        ({"end": "data-1"}, "end must be a step"),
        ({"start": "1/0"}, "start must be a step"),
        ({"blend_in": -1}, "blend_in must be a number of steps"),
        ({"layers": ()}, "layers must be patterns"),
    ],
)
def test_a_wrong_field_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        phase(**fields)


def test_overlapping_phases_are_refused_and_others_are_not():
    first = phase("a", end=50)
    with pytest.raises(ValueError, match=r"must not overlap in fprop, got 'a' .* and 'b'"):
        scheduled(first, phase("b", start=49, gemms="forward")).for_run(100)
    forward = replace(first, gemms="forward")
    scheduled(forward, phase("b", start=49, gemms="backward")).for_run(100)
    scheduled(first, phase("b", start=50)).for_run(100)
    attention = phase("a", layers=("*.q_proj",))
    scheduled(attention, phase("b", layers=("*.up_proj",))).for_run(100)
    with pytest.raises(ValueError, match="must not overlap"):
        scheduled(attention, phase("b")).for_run(100)


def test_two_phases_cannot_blend_in_one_step():
    with pytest.raises(ValueError, match="only one phase may blend in a step, got 'a' and 'b'"):
        scheduled(
            phase("a", gemms="forward", blend_in=5), phase("b", start=4, gemms="backward", blend_in=2)
        ).for_run(100)


@pytest.mark.parametrize("base", ["bf16", "mxfp8", "fp8"])
def test_a_schedule_needs_4_bit_operands(base):
    with pytest.raises(ValueError, match=f"needs a recipe with 4-bit operands.*got '{base}'"):
        scheduled(phase(), base=base)


def test_two_phases_of_one_name_are_refused():
    with pytest.raises(ValueError, match="must have different names, got 'p' twice"):
        scheduled(phase(end=1), phase(start=1))


def test_a_schedule_survives_yaml_and_overrides():
    recipe = scheduled(phase(start="82%", gemms=("fprop", "wgrad"), layers=("*.up_proj",), blend_in=0.01))
    assert build(Recipe, parse_yaml(dump_yaml(to_dict(recipe)), "yaml")) == recipe
    assert override(recipe, {"schedule.0.start": "7", "schedule.0.gemms": "both"}).schedule == (
        replace(recipe.schedule[0], start=7, gemms="both"),
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_shipped_schedules_join_recipes_by_name(name):
    recipe = get_recipe(f"nvfp4+{name}")
    assert (recipe.name, recipe.schedule) == (f"nvfp4+{name}", SCHEDULES[name])
    assert recipe_from_mapping({"base": "nvfp4", "schedule": name}, "file").schedule == SCHEDULES[name]
    assert recipe.for_run(100, warmup=5, decay=20).schedule[0].is_resolved


def test_an_unknown_schedule_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"no schedule is called 'late-foward'. Did you mean 'late-forward'"):
        get_recipe("nvfp4+late-foward")


def test_a_schedule_changes_a_digest_and_its_names_do_not():
    plain, recipe = get_recipe("nvfp4"), scheduled(phase("a", end=3))
    assert plain.digest == replace(plain, schedule=()).digest != recipe.digest
    assert scheduled(phase("b", end=3)).digest == recipe.digest != scheduled(phase("a", end=4)).digest


@pytest.mark.parametrize("base", list_recipes())
def test_every_recipe_has_a_valid_table_in_every_phase(base):
    """GemmTable checks itself: options of operands that a phase replaces must not contradict it."""
    table = RECIPES[base].table
    for name in ("bf16", "mxfp8", "fp8"):
        for gemms in ("both", "forward", "backward", "dgrad", "wgrad"):
            found = with_phases(table, [(phase(gemms=gemms), RECIPES[name].table)])
            kept = {"fprop", "dgrad", "wgrad"} - set(phase(gemms=gemms).affected)
            assert all(getattr(found, gemm) == getattr(table, gemm) for gemm in kept)
            assert all(
                getattr(found, gemm) == getattr(RECIPES[name].table, gemm)
                for gemm in phase(gemms=gemms).affected
            )
            assert is_plain(found) == (name == "bf16" and (gemms == "both" or is_plain(found)))


def test_packed_inputs_and_limited_rows_end_with_what_they_are_for():
    packed = replace(RECIPES["nvfp4"].table, saved_inputs="packed", gradient_rows="limited")
    bf16 = RECIPES["bf16"].table
    forward = with_phases(packed, [(phase(gemms="forward"), bf16)])
    assert (forward.saved_inputs, forward.gradient_rows) == ("exact", "limited")
    assert with_phases(packed, [(phase(gemms="backward"), bf16)]).gradient_rows == "any"
