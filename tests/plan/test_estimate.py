"""Plans: the paper's arithmetic, layouts that the trainer runs, figures never called measured."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from fourbits.cli.main import main
from fourbits.compare.report.plan_tables import checkpoint_rows, layout_rows, plan_tables, precision_table
from fourbits.device import PEAK_TERAFLOPS
from fourbits.model.counts import count_parameters, training_flops
from fourbits.plan.assumptions import assumptions
from fourbits.plan.claims import CLAIMS
from fourbits.plan.estimate import Plan, Prices, plan_run
from fourbits.plan.gathered import gathered
from fourbits.plan.gpus import GPUS, find_gpu
from fourbits.plan.layouts import ParallelLayout, unsupported
from fourbits.plan.linears import linear_groups
from fourbits.plan.machine import Machine
from fourbits.plan.memory import USABLE
from fourbits.plan.plain import plain_plan
from fourbits.plan.rates import DECLARED, gemm_seconds, shape_efficiency
from fourbits.plan.search import DoesNotFitError, SearchProblem, layouts, usable_ranks
from fourbits.plan.software import FOURBITS
from fourbits.recipe.presets import get_recipe
from fourbits.settings import override
from fourbits.train.config import load_config
from fourbits.train.parallel import ParallelConfig, mesh_shape, micro_batches
from fourbits.train.presets import RUN_PRESETS

PLAN_12B = plan_run(RUN_PRESETS["hybrid-12b"], GPUS["gb200"], 736)


def test_the_12b_has_the_papers_arithmetic():
    # arXiv:2509.25149: 62 blocks, 10T tokens, 736 sequences of 8,192 tokens; 12.3B with 131,072 tokens.
    assert sum(PLAN_12B.parameters.values()) == 12_314_591_360
    assert PLAN_12B.config.train.tokens_per_step == 736 * 8192 == 6_029_312
    assert PLAN_12B.config.train.num_steps == 1_658_565  # 10T / 6.03M, the last step whole
    assert PLAN_12B.tokens - 10 * 10**12 < 6_029_312


@pytest.mark.parametrize("background", [False, True])
def test_the_assumptions_say_what_training_waits_for(background):
    config = override(PLAN_12B.config, {"train.background_saves": background})
    text = " ".join(assumptions(replace(PLAN_12B, config=config)))
    assert ("waits while a checkpoint is copied to the host" in text) == background
    assert ("waits while a checkpoint is written" in text) != background


def test_every_declared_rate_is_among_the_assumptions():
    text = " ".join(assumptions(PLAN_12B))
    shares = (
        DECLARED.gemm,
        DECLARED.gemm_low,
        DECLARED.attention,
        DECLARED.scan,
        DECLARED.copy,
        DECLARED.elementwise,
    )
    for value in (*shares, DECLARED.quantize, DECLARED.quantize_stochastic, DECLARED.link, DECLARED.network):
        assert f"{value:.2f}" in text
    assert f"sums over replicas {DECLARED.replicas:.2f}" in text
    for seconds in (DECLARED.host_quantized, DECLARED.host_linear, DECLARED.host_block):
        assert f"{1e3 * seconds:.2f} ms" in text
    assert f"{1e3 * DECLARED.host_message:.1f} ms a gather" in text
    assert f"{1e6 * DECLARED.launch:.1f} us between two kernels" in text
    # the shape of a GEMM: tiles, waves, and the length of its sums
    assert "tiles of 128 x 256" in text
    assert "0.80 if the tiles are fewer" in text
    assert "k / (k + 128)" in text
    for word in ("are declared: ", "131,072", "restart", "GB/s", "W per GPU", "usable", "host"):
        assert word in text


def test_counts_are_those_of_the_model():
    assert PLAN_12B.parameters == count_parameters(PLAN_12B.config.model)
    whole = sum(training_flops(PLAN_12B.config.model, 8192).values())
    assert sum(PLAN_12B.flops.values()) == pytest.approx(whole)
    groups = linear_groups(PLAN_12B.config.model, get_recipe("nvfp4"))
    assert sum(g.weights for g in groups) == PLAN_12B.parameters["linear"] + PLAN_12B.parameters["head"]
    quantized = sum(g.count for g in groups if g.quantized)
    assert quantized == 116  # 20 stay in BF16, of 136; of 124 in the paper, where q, k and v are one


@pytest.mark.parametrize("gpus", [8, 64, 368])
def test_the_trainer_accepts_every_layout_without_tensor_parallelism(gpus):
    config = RUN_PRESETS["hybrid-12b"]
    found = list(layouts(config, gpus, 1))
    assert found
    for layout in found:
        parallel = replace(config.parallel, replicate=layout.replicate, shard=layout.shard)
        assert mesh_shape(parallel, layout.gpus) == (layout.replicate, layout.shard, 1)
        assert len(micro_batches(736 // layout.micro_batch, 0, layout.gpus)) == layout.accumulation
        assert layout.samples == 736
        assert unsupported(layout) is None


def test_a_layout_that_the_trainer_refuses_is_planned_with_its_reason(capsys):
    with pytest.raises(ValueError, match=r"shard must be at least 1, got 0\. Set it to null"):
        ParallelConfig(shard=0)
    reason = unsupported(ParallelLayout(shard=0, micro_batch=1, accumulation=1))
    assert reason == "parallel.shard must be at least 1, got 0"
    # 8B parameters fit 8 GPUs with 32 GB only if some of them share a layer.
    assert main(["plan", "hybrid-8b", "--gpu", "rtx5090", "--gpus", "8"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"parallel.tensor +4\n", out)
    because = unsupported(ParallelLayout(tensor=4, micro_batch=1, accumulation=1))
    assert because is None or (because in out and "12 GPUs fit without tensor parallelism" in out)


def test_gradients_add_up_in_shards_where_nothing_else_fits():
    plan = plan_run(RUN_PRESETS["hybrid-12b"], GPUS["a100"], 8, claims=False)
    layout = plan.estimate.choice.layout
    assert (layout.tensor, layout.accumulate) == (1, "sharded")
    assert plan.cannot_run is None
    rows = {row[0]: row[1] for row in layout_rows(plan.config, plan.estimate)}
    assert rows["parallel.accumulate"].startswith("sharded")
    held = replace(layout, accumulate="unsharded")
    groups = linear_groups(plan.config.model, plan.config.recipe)
    problem = SearchProblem(plan.config, groups, Machine(GPUS["a100"], DECLARED, FOURBITS))
    parameters = sum(plan.parameters.values())
    assert problem.memory(held).gradients == pytest.approx(4 * parameters)
    assert problem.memory(held).total > USABLE * GPUS["a100"].memory
    assert PLAN_12B.estimate.choice.layout.accumulate == "unsharded"


def test_weights_of_8_bits_are_gathered_in_bf16_as_the_trainer_sends_them():
    model = PLAN_12B.config.model
    layout = ParallelLayout(shard=2, micro_batch=1, accumulation=1)
    sent = {
        name: gathered(model, linear_groups(model, get_recipe(name)), layout, FOURBITS)
        for name in ("fp8", "bf16", "nvfp4")
    }
    assert sent["fp8"] == sent["bf16"]
    assert sent["bf16"].blocks > sent["nvfp4"].blocks


def test_a_step_uses_no_more_ranks_than_share_its_sequences():
    assert [usable_ranks(736, n) for n in (8, 64, 512, 736, 4096)] == [8, 46, 368, 736, 736]


def test_a_run_that_fits_nowhere_is_refused_in_one_line(capsys):
    assert main(["plan", "hybrid-12b", "--gpu", "rtx5090", "--gpus", "1"]) == 2
    error = capsys.readouterr().err
    assert "fits" in error
    assert len(error.splitlines()) == 1


def planned_with(usable: float, preset: str, gpus: int = 1, **settings: Any) -> Plan:
    """A plan on GPUs of so many usable bytes."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    gpu = replace(GPUS["h100"], memory=usable / USABLE)
    return plan_run(load_config(preset, RUN_PRESETS, given), gpu, gpus, claims=False)


@pytest.mark.parametrize(
    ("preset", "recipe", "usable", "remedy"),
    [  # the least that fits: 3.0053e9 in nvfp4, 3.0015e9 with packed inputs
        ("100m", "nvfp4", 3.003e9, "Set recipe.saved_inputs to packed, or use 2 GPUs or more."),
        ("100m", "nvfp4", 2.9e9, "Use 2 GPUs or more."),
        ("100m", "fp8", 2.9e9, "Use 2 GPUs or more."),  # cannot pack
        ("100m", "bf16", 2.9e9, "Use 2 GPUs or more."),  # has nothing to pack
        ("100m", "nvfp4", 1e8, "Use GPUs with more memory, a shorter train.seq_len, or a smaller model."),
    ],
)
def test_a_remedy_is_one_that_helps(preset, recipe, usable, remedy):
    with pytest.raises(DoesNotFitError) as error:
        planned_with(usable, preset, recipe=recipe)
    assert str(error.value).endswith(f" usable. {remedy}")
    if "packed" in remedy:
        planned_with(usable, preset, recipe=recipe, recipe__saved_inputs="packed")
    if "2 GPUs" in remedy:
        planned_with(usable, preset, 2, recipe=recipe)


def test_a_recipe_that_does_not_fit_is_shown_so_beside_those_that_do():
    # 26.65e9 bytes in BF16, 26.62e9 in nvfp4 with packed inputs
    plan = planned_with(26.63e9, "transformer-1.2b", recipe__saved_inputs="packed")
    assert plan.compared["bf16"] is None
    assert plan.compared["nvfp4"] is plan.estimate
    rows = {row[0]: row[1:] for row in precision_table(plan, Prices(gpu_hour=1.0)).rows}
    assert rows["bf16"][0] == "does not fit"
    assert len(rows["bf16"]) == len(rows["nvfp4"])
    plain = {each["recipe"]: each["fits"] for each in plain_plan(plan, Prices())["recipes"]}
    assert plain["nvfp4"]
    assert not plain["bf16"]


def test_every_table_with_figures_is_titled_predicted():
    titles = [table.title for table in plan_tables("hybrid-12b", PLAN_12B, Prices())]
    assert [title for title in titles if not title.endswith("; predicted")] == [titles[0], "assumptions"]
    assert titles[0].startswith("hybrid-12b: 12.3B parameters")  # counts, which are exact


def test_a_best_interval_is_no_longer_than_the_run(capsys):
    command = ["plan", "tiny", "--gpu", "h100"]
    assert main(command) == 0
    text = re.sub(r"  +", " ", capsys.readouterr().out)
    assert re.search(r"best interval the whole run \([\d.]+ s\): one at its end", text)
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoints"]["best_interval_steps"] == found["steps"]
    assert "the whole run" not in str(checkpoint_rows(PLAN_12B.config, PLAN_12B.estimate, PLAN_12B.failures))


def test_json_has_what_the_tables_have():
    found = plain_plan(PLAN_12B, Prices())
    assert found["checkpoints"]["bytes"] == 12 * 12_314_591_360
    assert found["checkpoints"]["own_interval_steps"] == 1000
    assert found["checkpoints"]["own_lost_share"] > found["checkpoints"]["lost_share"]
    assert len(found["memory_alternatives"]) == 6
    own = next(each for each in found["memory_alternatives"] if each["recompute"] == "none")
    assert own["bytes"] == PLAN_12B.estimate.choice.memory.total
    json.dumps(found)


def test_shard_groups_that_leave_gpus_of_a_domain_over_are_named():
    rows = {row[0]: row[1] for row in layout_rows(PLAN_12B.config, PLAN_12B.estimate)}
    assert rows["parallel.replicate x parallel.shard"] == "16 x 46"
    assert rows["link domains"] == "16 of 72 GPUs: 1 shard group of 46 in each, 26 GPUs left over"
    on_nodes = plan_run(RUN_PRESETS["hybrid-1.2b"], GPUS["h100"], 8, claims=False)
    assert "link domains" not in [row[0] for row in layout_rows(on_nodes.config, on_nodes.estimate)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny", "--gpu", "gb20"], "Did you mean 'gb200'?"),
        (["tiny"], "--gpu"),
        (["tiny", "--gpu", "h100", "--gpus", "0"], "from 1 to 1,000,000, got '0'"),
        (["tiny", "--gpu", "h100", "--gpus", "nan"], "got 'nan'. Pass the GPUs of your cluster, such as 64"),
        (["tiny", "--gpu", "h100", "--price=-1"], "--price"),
    ],
)
def test_mistakes_are_named(arguments, words, capsys):
    try:
        code = main(["plan", *arguments])
    except SystemExit as stop:  # of argparse
        code = stop.code
    assert code == 2
    assert words in capsys.readouterr().err


def test_json_and_tables_have_the_same_figures(capsys):
    command = ["plan", "100m", "--gpu", "h100", "--gpus", "4", "--price", "2"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    text = capsys.readouterr().out
    for recipe in found["recipes"]:
        assert f"{recipe['tokens_per_second']:,.0f}" in text
    assert found["tokens"] == found["steps"] * found["tokens_per_step"]
    assert found["figures"] == "predicted from declared rates"
    assert {each["recipe"] for each in found["recipes"]} == {"bf16", "fp8", "mxfp4", "nvfp4"}
    assert "emulated in BF16" in text
    assert not re.search(r"(?<!not )measured", text)


def test_a_simulation_is_shown_on_request(capsys):
    assert main(["plan", "100m", "--gpu", "h100", "--simulate"]) == 0
    assert "failures twice as often" in capsys.readouterr().out


def test_cost_and_energy_follow_from_time():
    own = PLAN_12B.estimate
    hours = own.seconds / 3600 * 736
    assert own.gpu_hours == pytest.approx(hours)
    assert own.cost(Prices(gpu_hour=4.0)) == pytest.approx(4 * hours)
    energy = hours * GPUS["gb200"].system_watts / 1000
    assert own.cost(Prices(kwh=0.1)) == pytest.approx(0.1 * energy)
    assert own.cost(Prices()) is None


def test_four_bits_gain_nothing_where_they_are_emulated_and_less_than_amdahl_where_not():
    amdahl = PLAN_12B.amdahl
    assert 1 < amdahl.predicted < amdahl.at_peak_ratio < amdahl.at_infinity
    emulated = plan_run(RUN_PRESETS["hybrid-1.2b"], GPUS["h200"], 1, claims=False)
    assert emulated.amdahl.predicted < 1
    assert not emulated.estimate.native


def test_claims_are_ratios_of_peaks_and_steps_keep_less():
    ratios = {claim.text: claim.of_peaks for claim in CLAIMS}
    assert [round(value, 1) for value in ratios.values()] == [4.0, 6.0, 2.0, 3.0, 7.6]
    for each in PLAN_12B.claims:
        assert each.of_steps is not None
        assert 1 < each.of_steps < each.of_peaks


def test_every_gpu_has_a_source_and_a_peak_from_the_one_table():
    for gpu in GPUS.values():
        assert gpu.source
        assert gpu.bf16_peak / 1e12 in {rates[next(iter(rates))] for rates in PEAK_TERAFLOPS.values()}
        assert (gpu.peak("nvfp4") is not None) == (gpu.name not in ("a100", "h100", "h200"))
    assert find_gpu("RTX Pro 6000") is GPUS["rtxpro6000"]


def test_a_gemm_of_whole_waves_runs_at_its_share_and_others_slower():
    h200 = GPUS["h200"]
    whole = shape_efficiency(h200, 128 * 132, 256, 1 << 20)
    assert whole == pytest.approx(1, abs=1e-3)
    assert shape_efficiency(h200, 128 * 133, 256, 1 << 20) == pytest.approx(133 / 264, rel=1e-3)
    assert shape_efficiency(h200, 128 * 132, 128, 1 << 20) == pytest.approx(0.5, rel=1e-3)
    # 16 rows: 34 MB of weights at 4.2 TB/s take 8 us, the arithmetic in full tiles 4.
    assert gemm_seconds(h200, DECLARED, (16, 4096, 4096), ("bf16", 2, 2)) == pytest.approx(8e-6, rel=0.05)


def test_packed_gathers_send_4_bits_and_a_scale_per_block():
    model = PLAN_12B.config.model
    groups = [g for g in linear_groups(model, get_recipe("nvfp4")) if g.quantized]
    sent, masters = (
        gathered(
            model, groups, ParallelLayout(shard=2, micro_batch=1, accumulation=1, gather=gather), FOURBITS
        )
        for gather in ("packed", "masters")
    )
    weights = sum(group.weights for group in groups)
    saved = (masters.blocks - sent.blocks) / weights
    assert saved == pytest.approx(4 - (4 + 8 / 256) / 8)


def test_a_prepared_folder_sets_the_vocabulary(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 400, encoding="utf-8")
    folder = tmp_path / "tokens"
    assert main(["data", "prepare", str(text), "--out", str(folder), "--vocab-size", "400"]) == 0
    capsys.readouterr()
    command = ["plan", "tiny", "--gpu", "h100", "--data.paths", str(folder), "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    vocabulary = found["parameters"]["embedding"] // 128
    assert vocabulary <= 400  # and not the 2,048 of data.vocab_size
    assert any(f"vocabulary of {vocabulary:,}" in line for line in found["assumptions"])


def test_a_schedule_is_named_as_not_planned():
    config = load_config("100m", RUN_PRESETS, {"recipe": "nvfp4+late-forward"})
    assert any("schedule" in line for line in assumptions(plan_run(config, GPUS["h100"], 1, claims=False)))
    assert not any("schedule" in line for line in assumptions(PLAN_12B))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("hybrid-12b", "--gpu", "h100", "--price", "nan"),
            "must be a number from 0 to 1,000,000, got 'nan'. Pass what you pay, such as 2.5",
        ),
        (
            ("hybrid-12b", "--gpu", "h100", "--power-price", "4,5"),
            "got '4,5'. Pass what you pay, such as 2.5",
        ),
        (("--road", "--json"), "plan: --road takes no --json, got both. Leave one out."),
        (("--road", "--gpus", "8"), "--road takes no --gpus"),
        (("--road", "--price", "0"), "--road takes no --price"),
        (("--published", "--power-price", "1"), "--published takes no --power-price"),
        (("--published", "--optim.lr", "1"), "--published takes no --optim.lr"),
        (("hybrid-12b", "--gpu", "h100", "--json", "--simulate"), "--json takes no --simulate"),
        (("hybrid-12b", "--gpu", "h100", "--published"), "--published takes no CONFIG"),
    ],
)
def test_options_without_effect_and_odd_prices_are_refused(options, message, capsys):
    try:
        code = main(["plan", *options])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_steps_of_many_sequences_are_planned_at_once():
    many = override(RUN_PRESETS["30m"], {"train.gradient_accumulation": 10**9})
    assert next(iter(layouts(many, 1, 1))).shard == 1
