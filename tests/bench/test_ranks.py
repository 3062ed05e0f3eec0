"""Steps of two ranks are measured against those of one, and what they send is what the process group got."""

import json

import pytest
import torch

from fourbits.bench.ranks.collectives import summarize
from fourbits.cli.main import main
from support.torchrun import torchrun

SMALL = """
model: {vocab_size: 64, d_model: 32, pattern: "*-", d_ffn: 64, num_heads: 2, num_kv_heads: 2, head_dim: 16}
train: {steps: 1, micro_batch_size: 1, gradient_accumulation: 4, seq_len: 32, compile: none}
"""
BY_ITSELF = "parallel: {gather_weights: 0"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "small.yaml"
    file.write_text(f"{SMALL}{BY_ITSELF}}}\n")
    return str(file)


#: nvfp4 without layers in BF16, so that every weight of a block can travel as codes and scales
WHOLE = "base: nvfp4\nkeep_bf16: {first_blocks: 0, last_blocks: 0}\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    file = tmp_path_factory.mktemp("recipe") / "whole.yaml"
    file.write_text(WHOLE)
    return str(file)


def measured(small, recipes, gather, ranks=2, tensor=1):
    words = ["bench", "ranks", "--preset", small, "--recipes", *recipes, "--repeats", "1"]
    words += ["--tensor", str(tensor)]
    ended = torchrun(ranks, [*words, "--device", "cpu", "--json", "--gather", gather])
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


#: values of the small model: linear layers of its two blocks, embedding (as many as the head), a norm
ATTENTION, FFN, TABLE, NORM = 4 * 32 * 32, 2 * 32 * 64, 64 * 32, 32


def gathered(linear, head):
    """Bytes that a step gathers. linear, head: bytes per weight.

    In both micro-batches the first block for the forward and for the backward pass, and the last one for
    both; the rest once.
    """
    blocks = 2 * (ATTENTION * linear + 4 * NORM) + FFN * linear + 4 * NORM
    return int(2 * blocks + TABLE * (4 + head) + 4 * NORM)


def test_two_ranks_are_compared_with_one_and_send_what_sharding_needs(small, whole):
    """Packed weights: half a byte per value, a byte per 256 of them, 3.97 times fewer than BF16."""
    found = measured(small, ["bf16", whole], "packed")
    assert (found["ranks"], found["micro_batches"], found["tokens_per_micro_batch"]) == (2, 2, [1, 32])
    assert found["parameters"] == ATTENTION + FFN + 2 * TABLE + 3 * NORM
    assert [run["recipe"] for run in found["runs"]] == ["bf16", whole]
    for run, bar in zip(found["runs"], found["bars"], strict=True):
        assert bar["value"] == pytest.approx(run["tokens_per_second"] / run["tokens_per_second_alone"])
        assert run["tokens_per_second"] == pytest.approx(2 * 64 / run["seconds"])
        sums, gathers = run["traffic"]["reduce_scatter"], run["traffic"]["all_gather"]
        # FP32 gradients of every parameter, once per step: of two blocks, and of the rest
        assert (sums["calls"], sums["whole"], 2 * sums["own"]) == (3, 4 * found["parameters"], sums["whole"])
        assert gathers["calls"] == 2 * 3 + 1
        assert 2 * gathers["own"] == gathers["whole"]
    counts = [run["traffic"]["all_gather"]["whole"] for run in found["runs"]]
    assert counts == [gathered(2, 2), gathered(1 / 2 + 1 / 256, 2)]
    rest = gathered(0, 2)
    assert (counts[0] - rest) / (counts[1] - rest) >= 3.9
    assert "as codes and scales" in found["runs"][1]["gather"][0]


def test_ranks_that_share_layers_send_activations_in_bf16(small):
    """Two mixers gather tokens and scatter sums, forward and backward, in two micro-batches."""
    found = measured(small, ["nvfp4"], "packed", tensor=2)
    (run,) = found["runs"]
    assert (found["ranks"], found["tensor"], found["micro_batches"]) == (2, 2, 2)
    assert run["tokens_per_second"] == pytest.approx(64 / run["seconds"])
    messages, tokens = 2 * 2 * 2, 32 * 32 * 2
    sums, gathers = run["traffic"]["reduce_scatter"], run["traffic"]["all_gather"]
    # embedding, head and norm are cut over both ranks
    rest = TABLE * (4 + 2) + 4 * NORM
    assert (gathers["calls"], gathers["whole"]) == (messages + 1, messages * tokens + rest)
    assert (sums["calls"], sums["whole"]) == (messages + 1, messages * tokens + 4 * (2 * TABLE + NORM))


@pytest.mark.slow
def test_gradients_that_add_up_in_shards_are_summed_after_every_micro_batch(small, tmp_path):
    file = tmp_path / "sharded.yaml"
    file.write_text(f"{SMALL}{BY_ITSELF}, accumulate: sharded}}\n")
    found = measured(str(file), ["bf16"], "masters")
    sums = found["runs"][0]["traffic"]["reduce_scatter"]
    assert (sums["calls"], sums["whole"]) == (2 * 3, 2 * 4 * found["parameters"])
    assert found["runs"][0]["traffic"]["all_gather"]["whole"] == gathered(4, 4)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_is_gathered_where_every_rank_has_the_whole_model(small, tmp_path, ranks):
    file = tmp_path / "replicated.yaml"
    file.write_text(f"{SMALL}parallel: {{replicate: {ranks}}}\n")
    found = measured(str(file), ["nvfp4"], "packed", ranks)
    assert found["runs"][0]["traffic"]["all_gather"]["calls"] == 0
    assert found["runs"][0]["gather"] == []


def event(name, cat, dims=(), kinds=(), dur=0.0):
    return {"name": name, "cat": cat, "dur": dur, "args": {"Input Dims": dims, "Input type": kinds}}


def test_messages_count_by_their_dtype_and_kernels_by_their_name():
    events = [
        {"name": "process_name", "ph": "M"},
        event("c10d::_allgather_base_", "cpu_op", [[8], [4], []], ["unsigned char"] * 2 + [""]),
        event("c10d::_allgather_base_", "cpu_op", [[8], [4], []], ["float"] * 2 + [""]),
        event("c10d::_reduce_scatter_base_", "cpu_op", [[2], [8], []], ["c10::BFloat16"] * 2 + [""]),
        event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel", dur=3.0),
        event("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(...)", "kernel", dur=5.0),
    ]
    found = summarize(events, on_gpu=True)
    gather, scatter = found["all_gather"], found["reduce_scatter"]
    assert (gather.calls, gather.whole, gather.own, gather.moved) == (2, 40, 20, 20)
    assert (scatter.calls, scatter.whole, scatter.own) == (1, 16, 4)
    assert (gather.device_seconds, scatter.device_seconds) == pytest.approx((3e-6, 5e-6))
    assert summarize(events, on_gpu=False)["all_gather"].device_seconds is None
    with pytest.raises(ValueError, match="'mystery'"):
        summarize([event("c10d::_allgather_base_", "cpu_op", [[8], [4]], ["mystery"] * 2)], on_gpu=False)


def test_without_a_launcher_the_benchmark_says_how_to_start_it(small, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["bench", "ranks", "--preset", small, "--device", "cpu"]) == 2
    assert "torchrun --nproc-per-node 2 -m fourbits bench ranks" in capsys.readouterr().err


def test_other_benchmarks_are_for_one_process(monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main(["bench", "step", "--device", "cpu"]) == 2
    assert "torchrun started 2" in capsys.readouterr().err
