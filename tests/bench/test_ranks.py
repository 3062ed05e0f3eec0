"""Steps of two ranks are measured against those of one, and what they send is what the process group got."""

import json

import pytest
import torch

from fourbits.bench.ranks.collectives import summarize
from fourbits.cli.main import main
from support.torchrun import torchrun

SMALL = """
model: {vocab_size: 64, d_model: 32, pattern: "*-", d_ffn: 64, num_heads: 2, num_kv_heads: 1, head_dim: 16}
train: {steps: 1, micro_batch_size: 1, gradient_accumulation: 4, seq_len: 32, compile: none}
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "small.yaml"
    file.write_text(SMALL)
    return str(file)


def test_two_ranks_are_compared_with_one_and_send_what_sharding_needs(small):
    ended = torchrun(
        2,
        ["bench", "ranks", "--preset", small, "--recipes", "bf16", "nvfp4", "--repeats", "1"]
        + ["--device", "cpu", "--json"],
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["ranks"], found["micro_batches"], found["tokens_per_micro_batch"]) == (2, 2, [1, 32])
    assert [run["recipe"] for run in found["runs"]] == ["bf16", "nvfp4"]
    embedding_and_head, norm = 2 * 64 * 32, 32
    root, blocks = embedding_and_head + norm, found["parameters"] - embedding_and_head - norm
    for run, bar in zip(found["runs"], found["bars"], strict=True):
        assert bar["value"] == pytest.approx(run["tokens_per_second"] / run["tokens_per_second_alone"])
        assert run["tokens_per_second"] == pytest.approx(2 * 64 / run["seconds"])
        sums = run["traffic"]["reduce_scatter"]
        # FP32 gradients of every parameter, once per step: of two blocks, and of the rest
        assert (sums["calls"], sums["whole"]) == (3, 4 * found["parameters"])
        assert 2 * sums["own"] == sums["whole"]
        gathers = run["traffic"]["all_gather"]
        # FP32 masters of the blocks twice per micro-batch, except that the last block stays; of the rest once
        assert gathers["whole"] <= 2 * (2 * 4 * blocks + 4 * root)
        assert gathers["whole"] >= 2 * (4 * blocks + 4 * root)


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
