"""The road to 12B: its page has the plan's figures, its commands parse, its stages pass lint and fit."""

import shlex
from pathlib import Path

import pytest

from fourbits.cli.commands import load
from fourbits.cli.parser import parse
from fourbits.cli.plan_tables import road_row
from fourbits.lint.lint import lint
from fourbits.plan.memory import USABLE
from fourbits.plan.road import ROAD, THROUGHPUT
from fourbits.train.config import load_config
from fourbits.train.presets import RUN_PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "road-to-12b.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line)
    for block in PAGE.split("```sh\n")[1:]
    for line in block.split("```")[0].splitlines()
    if line
]


@pytest.mark.parametrize("stage", ROAD, ids=lambda stage: stage.preset)
def test_the_page_has_the_figures_of_the_plan(stage):
    assert f"| {' | '.join(road_row(stage))} |" in PAGE
    assert f"| {stage.preset} | {stage.gap:.1%} | {stage.gap_source} |" in PAGE
    assert f"at least {THROUGHPUT} of the plan's tokens/s" in PAGE


@pytest.mark.parametrize("stage", ROAD, ids=lambda stage: stage.preset)
def test_a_stage_fits_can_run_today_and_has_only_the_findings_of_the_page(stage):
    plan = stage.plan()
    assert tuple(found.rule for found in lint(stage.config(), stage.gpus)) == stage.findings
    assert all(f"`{rule}`" in PAGE for rule in stage.findings)
    assert plan.cannot_run is None
    assert plan.estimate.choice.memory.total <= USABLE * plan.gpu.memory
    assert plan.estimate.choice.layout.gpus == stage.gpus


def test_stages_grow_and_the_last_is_the_published_run():
    assert sorted(ROAD, key=lambda stage: stage.plan().tokens) == list(ROAD)
    assert (ROAD[-1].preset, ROAD[-1].plan().config.train.tokens) == ("hybrid-12b", 10**13)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_of_the_page_parses_and_its_settings_build_a_run(words):
    start = words.index("fourbits")
    assert start == 0 or words[:1] == ["torchrun"]
    name, *arguments = words[start + 1 :]
    args = parse(name, load(name), arguments)
    if name in ("train", "lint", "plan") and getattr(args, "config", None):
        recipe = {"recipe": args.recipe} if getattr(args, "recipe", None) else {}
        load_config(args.config, RUN_PRESETS, {**args.overrides, **recipe})


@pytest.mark.parametrize("stage", ROAD[2:], ids=lambda stage: stage.preset)
def test_the_run_of_a_stage_on_many_gpus_has_the_layout_of_its_plan(stage):
    (words,) = (words for words in COMMANDS if {"train", stage.preset} <= set(words))
    arguments = words[words.index("fourbits") + 2 :]
    args = parse("train", load("train"), arguments)
    config = load_config(stage.preset, RUN_PRESETS, args.overrides)
    layout, train = stage.plan().estimate.choice.layout, config.train
    assert (config.parallel.replicate or 1) == layout.replicate
    assert train.micro_batch_size == layout.micro_batch
    assert train.gradient_accumulation == layout.accumulation * layout.data_ranks
    assert train.activation_checkpointing == "none"
    assert layout.recomputed == 0


def test_every_stage_has_a_section_with_lint_plan_and_a_run():
    for stage in ROAD:
        names = {words[words.index("fourbits") + 1] for words in COMMANDS if stage.preset in words}
        assert names >= {"lint", "plan"}
        assert names & {"train", "compare"}
