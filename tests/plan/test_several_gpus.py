"""What several GPUs send, hold and wait for in a plan, against the trainer's shards and docs/scaling.md."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fourbits.linear.convert import convert
from fourbits.model import counts
from fourbits.model.counts import count_parameters
from fourbits.model.lm import LanguageModel
from fourbits.plan.assumptions import assumptions
from fourbits.plan.communication import traffic
from fourbits.plan.estimate import plan_run
from fourbits.plan.gathered import block_weights, blocks_per_gather, end_weights, gathered
from fourbits.plan.gpus import GPUS
from fourbits.plan.grid import grid
from fourbits.plan.layouts import ParallelLayout
from fourbits.plan.linears import LinearGroup, linear_groups
from fourbits.plan.machine import Machine
from fourbits.plan.memory import Memory, memory_of
from fourbits.plan.rates import DECLARED
from fourbits.plan.saved import saved_per_token
from fourbits.plan.software import FOURBITS
from fourbits.plan.step import HOST, step_of
from fourbits.recipe.presets import get_recipe
from fourbits.settings import override
from fourbits.train.parallel import ParallelConfig
from fourbits.train.presets import RUN_PRESETS
from fourbits.train.ranks.block_groups import block_groups
from fourbits.train.ranks.tensor_parallel import TensorRanks, split_layers

DOCS = Path(__file__).parents[2] / "docs"
MODEL_12B, MODEL_1B = RUN_PRESETS["hybrid-12b"].model, RUN_PRESETS["hybrid-1.2b"].model
H200 = Machine(GPUS["h200"], DECLARED, FOURBITS)
NVFP4 = get_recipe("nvfp4")
ONE = ParallelLayout(micro_batch=2, accumulation=2)


def held(layout: ParallelLayout) -> Memory:
    """hybrid-1.2b in nvfp4 with sequences of 8,192 tokens."""
    return memory_of(MODEL_1B, linear_groups(MODEL_1B, NVFP4), False, 8192, layout, H200.gpu, FOURBITS)


@pytest.mark.parametrize(("shard", "expected"), [(8, 0.07), (64, 0.21), (1024, 0.66)])
def test_gathers_take_the_time_that_the_page_on_several_gpus_gives(shard, expected):
    layout = ParallelLayout(shard=shard, micro_batch=1, accumulation=1)
    found = traffic(MODEL_12B, linear_groups(MODEL_12B, NVFP4), layout, H200, 8192)
    assert 2 * found.gather == pytest.approx(expected, abs=0.005)  # two decimals
    page = (DOCS / "scaling.md").read_text(encoding="utf-8")
    assert f"| {shard} | 1 x {shard} |" in page
    assert f"| 1.37 | {expected:.2f} |" in page


def test_ranks_that_share_layers_have_the_weights_that_the_trainer_gives_them():
    model = MODEL_1B
    with torch.device("meta"):
        built = LanguageModel(model)
    convert(built, NVFP4)
    split_layers(built, TensorRanks(None, 0, 2))
    own = {name: parameter.numel() for name, parameter in built.named_parameters()}
    ends = own["embed.weight"] + own["head.weight"]
    layout = ParallelLayout(tensor=2, micro_batch=1, accumulation=1)
    assert ends == end_weights(model)  # whole on every rank
    linears = {name: size for name, size in own.items() if name.endswith("proj.weight")}
    groups = [group for group in linear_groups(model, NVFP4) if group.name != "head"]
    assert sum(linears.values()) == sum(math.prod(group.on_rank(2)) * group.count for group in groups)
    # norms of the residual stream are whole, too, which the plan leaves out
    whole = model.d_model * (model.num_residual_branches + 1)
    assert sum(own.values()) - ends == block_weights(model, layout) + whole / 2


def test_embedding_and_head_are_gathered_and_summed_whole_over_all_ranks_of_a_copy():
    groups = linear_groups(MODEL_1B, NVFP4)
    sent = {
        tensor: gathered(
            MODEL_1B, groups, ParallelLayout(tensor=tensor, micro_batch=1, accumulation=1), FOURBITS
        )
        for tensor in (1, 2)
    }
    assert sent[2].ends == sent[1].ends
    assert sent[2].blocks == sent[1].blocks / 2
    found = [
        traffic(MODEL_1B, groups, replace(ONE, **sizes), H200, 8192)
        for sizes in ({"shard": 4}, {"shard": 2, "tensor": 2}, {"tensor": 4})
    ]
    assert {round(each.ends, 12) for each in found} == {round(found[0].ends, 12)}
    assert found[2].gather == found[2].reduce == 0
    assert held(replace(ONE, tensor=2)).gathered == 4 * end_weights(MODEL_1B)


def test_layers_split_by_outputs_save_the_inputs_of_all_tokens():
    groups = linear_groups(MODEL_1B, get_recipe("bf16"))
    names = {group.name for group in groups if group.column_parallel}
    assert names == {"in_proj", "q_proj", "k_proj", "v_proj", "up_proj"}
    saved = saved_per_token(MODEL_1B, groups, False, FOURBITS)
    assert saved.unsharded_inputs == 2 * MODEL_1B.d_model * MODEL_1B.num_residual_branches
    both = held(ONE).linear_inputs, held(replace(ONE, tensor=2)).linear_inputs
    assert both[1] - both[0] / 2 == pytest.approx(saved.unsharded_inputs / 2 * 2 * 8192)


def test_gradients_are_counted_where_they_exist():
    parameters = 4 * sum(count_parameters(MODEL_1B).values())
    two = replace(ONE, shard=2)
    assert held(two).gradients == parameters  # whole, of the first micro-batch; none of the shard yet
    assert held(replace(two, accumulation=1)).gradients == 0  # in the loss of the only one
    assert held(replace(two, accumulate="sharded")).gradients == parameters / 2


def test_the_last_sum_is_the_peak_where_activations_are_few():
    model = RUN_PRESETS["hybrid-8b"].model
    args = (linear_groups(model, NVFP4), False, 8192)
    layout = ParallelLayout(shard=2, micro_batch=1, accumulation=1, recomputed=1.0)
    once = memory_of(model, *args, layout, H200.gpu, FOURBITS)
    shard, ends = 2 * sum(count_parameters(model).values()), end_weights(model)
    assert once.total == 4 * shard + 8 * ends  # masters, moments, gradients; the ends' gradients, and a copy
    sums = replace(layout, accumulation=2, accumulate="sharded")
    assert memory_of(model, *args, sums, H200.gpu, FOURBITS).total == once.total + shard


def test_weights_kept_for_a_step_take_the_memory_of_all_blocks():
    model, groups = MODEL_1B, linear_groups(MODEL_1B, NVFP4)
    freed = ParallelLayout(shard=2, micro_batch=1, accumulation=4)
    args = (groups, False, 2048)
    more = [
        memory_of(model, *args, layout, H200.gpu, FOURBITS).gathered
        for layout in (replace(freed, reshard="step"), freed)
    ]
    blocks = len(model.pattern)
    whole = gathered(model, groups, freed, FOURBITS).blocks
    assert more[0] - more[1] == pytest.approx(whole * (blocks - 2) / blocks)


def test_blocks_share_gathers_as_the_trainer_groups_them():
    with torch.device("meta"):
        built = LanguageModel(MODEL_1B)
    weights = ParallelConfig().gather_weights
    groups = block_groups(built.blocks, weights)
    layout = ParallelLayout(shard=2, micro_batch=1, accumulation=1, gather_weights=weights)
    each = blocks_per_gather(MODEL_1B, layout)
    # the plan has blocks of the mean size
    assert abs(math.ceil(len(MODEL_1B.pattern) / each) - len(groups)) <= 1
    assert blocks_per_gather(MODEL_12B, layout) == 1
    assert blocks_per_gather(RUN_PRESETS["tiny"].model, layout) == len(RUN_PRESETS["tiny"].model.pattern)


def test_a_step_waits_for_a_host_that_launches_gathers():
    model, groups = RUN_PRESETS["30m"].model, linear_groups(RUN_PRESETS["30m"].model, NVFP4)

    def waits(layout: ParallelLayout) -> float:
        return step_of(model, groups, 512, layout, H200).parts.get(HOST, 0.0)

    layout = ParallelLayout(shard=2, micro_batch=1, accumulation=4)
    free = replace(H200, rates=replace(DECLARED, host_message=0.0))
    added = waits(layout) - step_of(model, groups, 512, layout, free).parts[HOST]
    blocks = len(model.pattern)  # each gathered twice per micro-batch, and summed once per step
    assert added == pytest.approx((4 * 2 + 1) * blocks * DECLARED.host_message)
    once = replace(layout, reshard="step")
    fewer = (4 * 2 - 1) * blocks * DECLARED.host_message
    assert waits(layout) - waits(once) == pytest.approx(fewer)
    together = replace(layout, gather_weights=1 << 40)
    assert waits(layout) - waits(together) == pytest.approx(added * (blocks - 1) / blocks)


def test_the_page_says_how_long_the_12b_waits_for_a_slow_host():
    page = (DOCS / "plan.md").read_text(encoding="utf-8")
    seconds = [
        plan_run(
            RUN_PRESETS["hybrid-12b"],
            GPUS["gb200"],
            736,
            replace(DECLARED, host_message=cost),
            claims=False,
        ).estimate.step_seconds
        for cost in (DECLARED.host_message, 2e-3)
    ]
    assert f"{seconds[1]:.2f} s instead of {seconds[0]:.2f} s" in page


def test_a_plan_with_tensor_parallelism_names_what_it_omits():
    plan = plan_run(RUN_PRESETS["hybrid-8b"], GPUS["rtx5090"], 8, claims=False)
    assert plan.estimate.choice.layout.tensor > 1
    assert any("messages of tensor parallelism" in line for line in assumptions(plan))
    alone = plan_run(RUN_PRESETS["hybrid-1.2b"], GPUS["h200"], 2, claims=False)
    assert not any("tensor parallelism" in line for line in assumptions(alone))


def test_a_mesh_that_the_search_ignores_is_named():
    config = override(RUN_PRESETS["hybrid-1.2b"], {"parallel.tensor": 2, "parallel.replicate": 2})
    text = " ".join(assumptions(plan_run(config, GPUS["h100"], 8, claims=False)))
    assert "whatever the configuration asks for: parallel.replicate 2, parallel.tensor 2" in text
    plain = assumptions(plan_run(RUN_PRESETS["hybrid-1.2b"], GPUS["h100"], 8, claims=False))
    assert not any("asks for" in line for line in plain)


def test_a_page_counts_a_models_parameters_once(monkeypatch):
    counts._parameters.cache_clear()
    grid(RUN_PRESETS["hybrid-1.2b"], GPUS["h100"], 64)
    assert counts._parameters.cache_info().misses == 1
    made = count_parameters(MODEL_1B)
    made["linear"] = 0  # a caller's own copy
    assert count_parameters(MODEL_1B)["linear"] > 0


def test_a_step_does_not_depend_on_the_order_of_sets():
    code = (
        "from fourbits.plan.estimate import plan_run; from fourbits.plan.gpus import GPUS;"
        "from fourbits.train.presets import RUN_PRESETS;"
        "plan = plan_run(RUN_PRESETS['hybrid-12b'], GPUS['h100'], 512, claims=False);"
        "print(plan.estimate.choice.step.parts)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": str(seed), "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (0, 1, 2)
    }
    assert len(found) == 1
    assert "recomputation" in found.pop()


def test_a_group_knows_what_its_table_says():
    tables = {name: linear_groups(MODEL_1B, get_recipe(name)) for name in ("nvfp4", "nvfp4-naive", "fp8")}
    inner: dict[str, LinearGroup] = {
        name: next(group for group in groups if group.quantized) for name, groups in tables.items()
    }
    assert [(group.kept, group.packable) for group in inner.values()] == [
        (True, True),
        (False, False),
        (inner["fp8"].table.keeps_weight, False),
    ]
