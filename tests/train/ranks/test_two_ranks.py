"""Two ranks train what one process trains."""

import json

import pytest

from fourbits.exchange.tensor_files import TensorFile
from fourbits.settings import override
from fourbits.train.run import run
from fourbits.train.stop import StopRequest
from support.torchrun import timeless, torchrun, written


@pytest.fixture(scope="module")
def unclipped(config):
    """Without clipping, whose factor is a norm over shards, and with fewer steps."""
    return override(config, {"optim.grad_clip": None, "train.steps": 6})


@pytest.fixture(scope="module")
def runs(unclipped, data_cache, tmp_path_factory):
    """The folders of one process and of two ranks, and what torchrun printed."""
    folder = tmp_path_factory.mktemp("runs")
    run(unclipped, folder / "one", stop=StopRequest(), data_cache=data_cache)
    ended = torchrun(2, ["train", written(unclipped, folder), "--out", str(folder / "two")])
    assert ended.returncode == 0, ended.stderr
    return folder / "one", folder / "two", ended


def test_two_ranks_end_with_the_masters_and_moments_of_one_process(runs):
    """One micro-batch each: a sum of two gradients has no order, and so all codes of all steps are equal."""
    one, two, _ = runs
    for name in ("model", "optimizer"):
        files = [TensorFile(run / "checkpoints/step_6" / f"{name}.safetensors") for run in (one, two)]
        assert list(files[0]) == list(files[1])
        for key in files[0]:
            assert files[0][key].equal(files[1][key]), key


def test_two_ranks_record_the_losses_of_one_process(runs):
    one, two, _ = runs
    assert timeless(two, "grad_norm") == timeless(one, "grad_norm")
    norms = [[record["grad_norm"] for record in timeless(out) if "grad_norm" in record] for out in (one, two)]
    # FP32 sums of squares in another order
    assert norms[1] == pytest.approx(norms[0], rel=2**-20)


def test_manifests_of_one_process_and_two_ranks_have_equal_hashes(runs):
    one, two = (json.loads((out / "manifest.json").read_text()) for out in runs[:2])
    assert one["hashes"] == two["hashes"]
    assert two["parallel"] == {"ranks": 2, "mesh": {"replicate": 1, "shard": 2}, "gradients": "fp32"}


def test_rank_0_prints_and_writes_and_the_other_has_a_log(runs):
    _, two, ended = runs
    assert ended.stdout.count("finished after 6 steps") == 1
    assert (two / "report.html").is_file()
    log = (two / "logs" / "rank_1.txt").read_text()
    assert "step 6/6" in log
    assert "ended: finished after 6 steps" in log
