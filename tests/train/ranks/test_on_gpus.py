"""Ranks on GPUs, over NCCL: the operands of one process, and what they send."""

import json

import pytest
import torch

from fourbits.data.config import open_data
from fourbits.settings import override
from fourbits.train.load_run import open_trained
from support.torchrun import torchrun, written
from train.ranks.test_codes import operands

pytestmark = pytest.mark.gpu
RANKS = 2
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")


@pytest.fixture
def on_gpus(config):
    """Kernel by kernel, as several ranks train."""
    changes = {"train.device": "cuda", "train.cuda_graph": False, "train.gradient_accumulation": 4}
    return override(config, changes)


@two_gpus
@pytest.mark.parametrize("gather", ["packed", "masters"])
def test_every_operand_of_a_step_is_that_of_one_process(on_gpus, data_cache, tmp_path, gather):
    settings = override(on_gpus, {"parallel.gather": gather})
    open_data(settings.data, data_cache)
    file = written(settings, tmp_path)
    assert operands(RANKS, file, data_cache, tmp_path / "ranks") == operands(
        0, file, data_cache, tmp_path / "one"
    )


@two_gpus
@pytest.mark.parametrize("background", ["false", "true"])
def test_packed_gathers_end_with_the_masters_of_gathered_masters(on_gpus, tmp_path, background):
    file = written(override(on_gpus, {"train.checkpoint_interval": 2}), tmp_path)
    for gather in ("packed", "masters"):
        words = ["--parallel.gather", gather, "--train.background_saves", background]
        ended = torchrun(RANKS, ["train", file, "--out", str(tmp_path / gather), *words])
        assert ended.returncode == 0, ended.stderr
    one, two = (open_trained(tmp_path / gather) for gather in ("packed", "masters"))
    assert all(master.equal(two.masters[name]) for name, master in one.masters.items())


def test_one_rank_on_a_gpu_trains_as_one_process(on_gpus, data_cache, tmp_path):
    open_data(on_gpus.data, data_cache)
    file = written(on_gpus, tmp_path)
    assert operands(1, file, data_cache, tmp_path / "rank") == operands(0, file, data_cache, tmp_path / "one")


@two_gpus
def test_the_benchmark_counts_what_nccl_was_given(on_gpus, tmp_path):
    words = ["bench", "ranks", "--preset", written(on_gpus, tmp_path), "--recipes", "nvfp4", "--repeats", "2"]
    ended = torchrun(RANKS, [*words, "--accumulation", "1", "--json"])
    assert ended.returncode == 0, ended.stderr
    (run,) = json.loads(ended.stdout)["runs"]
    gathers, sums = run["traffic"]["all_gather"], run["traffic"]["reduce_scatter"]
    assert RANKS * gathers["own"] == gathers["whole"]
    assert sums["whole"] == 4 * json.loads(ended.stdout)["parameters"]
    assert gathers["device_seconds"] > 0
    assert sums["device_seconds"] > 0
