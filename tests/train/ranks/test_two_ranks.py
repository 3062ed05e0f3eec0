"""Two ranks go on from one process, and one process from them, as if nothing had changed."""

import json
import shutil
import signal

import pytest

from fourbits.settings import override
from fourbits.train.checkpoint import open_checkpoint
from fourbits.train.listener import RunListener
from fourbits.train.load_run import load_trained, open_trained
from fourbits.train.run import run
from fourbits.train.run_folder import RunFolder
from fourbits.train.stop import StopRequest
from support.torchrun import timeless, torchrun, written


class StopsAt2(RunListener):
    """Asks a run to stop after its second step."""

    def __init__(self, stop):
        self.stop = stop

    def step(self, record):
        if record["step"] == 2:
            self.stop.signal = signal.SIGINT


@pytest.fixture(scope="module")
def unclipped(config):
    """Without clipping, whose factor is a norm over shards, and with fewer steps."""
    changes = {"optim.grad_clip": None, "train.steps": 6, "train.checkpoint_interval": 2}
    return override(config, {**changes, "train.keep_checkpoints": 9, "train.health_interval": 2})


@pytest.fixture(scope="module")
def runs(unclipped, data_cache, tmp_path_factory):
    """(a run of one process, the same where two ranks ran steps 3 to 6, what torchrun printed)."""
    folder = tmp_path_factory.mktemp("runs")
    run(unclipped, folder / "one", stop=StopRequest(), data_cache=data_cache)
    stop = StopRequest()
    run(unclipped, folder / "two", listener=StopsAt2(stop), stop=stop, data_cache=data_cache)
    ended = torchrun(2, ["train", written(unclipped, folder), "--out", str(folder / "two")])
    assert ended.returncode == 0, ended.stderr
    return folder / "one", folder / "two", ended


def assert_same_masters(one, two):
    """Their newest checkpoints, in whatever files, hold the same bits."""
    stored = [open_trained(out) for out in (one, two)]
    assert [each.step for each in stored] == [6, 6]
    for name, master in stored[0].masters.items():
        assert master.equal(stored[1].masters[name]), name


def test_two_ranks_end_with_the_masters_of_one_process(runs):
    """One micro-batch each: a sum of two gradients has no order, and so all codes of all steps are equal."""
    assert_same_masters(*runs[:2])


def test_one_rank_with_two_micro_batches_per_step_has_the_masters_of_one_process(runs, unclipped, tmp_path):
    """Embedding, norm and head are gathered once per step, and again after each update and validation."""
    ended = torchrun(1, ["train", written(unclipped, tmp_path), "--out", str(tmp_path / "rank")])
    assert ended.returncode == 0, ended.stderr
    assert_same_masters(runs[0], tmp_path / "rank")
    assert timeless(tmp_path / "rank", "grad_norm") == timeless(runs[0], "grad_norm")


def test_two_ranks_record_the_losses_of_one_process(runs):
    one, two, _ = runs
    assert timeless(two, "grad_norm") == timeless(one, "grad_norm")
    norms = [[record["grad_norm"] for record in timeless(out) if "grad_norm" in record] for out in (one, two)]
    # FP32 sums of squares in another order
    assert norms[1] == pytest.approx(norms[0], rel=2**-20)


def test_two_ranks_sample_the_health_of_one_process(runs):
    """Rank 0 has the first micro-batch. Its weights are gathered as codes, but samples read whole masters."""
    one, two = ((out / "health.jsonl").read_text().splitlines() for out in runs[:2])
    # of steps 2, 4 and 6; what swings is seen from the third on, and a resumed run has only two
    assert len(one) == len(two) == 3
    assert two[:2] == one[:2]
    assert "as codes and scales" in (runs[1] / "log.txt").read_text()


def test_manifests_of_one_process_and_two_ranks_have_equal_hashes(runs):
    one, two = (json.loads((out / "manifest.json").read_text()) for out in runs[:2])
    assert one["hashes"] == two["hashes"]
    forms = {"gradients": "fp32", "gather": "packed", "reshard": "pass", "accumulate": "unsharded"}
    assert two["parallel"] == {"ranks": 2, "mesh": {"replicate": 1, "shard": 2, "tensor": 1}, **forms}
    assert [session["ranks"] for session in two["sessions"]] == [1, 2]


def test_rank_0_prints_and_writes_and_the_other_has_a_log(runs):
    _, two, ended = runs
    assert ended.stdout.count("finished after 6 steps") == 1
    assert (two / "report.html").is_file()
    log = (two / "logs" / "rank_1.txt").read_text()
    assert "step 6/6" in log
    assert "ended: finished after 6 steps" in log


def test_each_rank_writes_its_shards(runs):
    checkpoint = open_checkpoint(runs[1] / "checkpoints" / "step_4")
    assert {name.split("-")[0] + name.split("-")[1] for name in checkpoint.files} == {
        f"{part}/shard{rank:05d}" for part in ("model", "optimizer") for rank in (1, 2)
    }


def test_one_process_continues_from_shards(runs, unclipped, data_cache, tmp_path):
    one, two, _ = runs
    again = tmp_path / "again"
    shutil.copytree(two, again)
    shutil.rmtree(again / "checkpoints" / "step_6")
    (again / "summary.json").unlink()
    run(unclipped, again, stop=StopRequest(), data_cache=data_cache)
    assert_same_masters(one, again)
    assert timeless(again, "grad_norm") == timeless(one, "grad_norm")


def test_a_model_is_loaded_from_shards(runs):
    models = [load_trained(out).model.state_dict() for out in runs[:2]]
    assert all(tensor.equal(models[1][name]) for name, tensor in models[0].items())


def test_a_flipped_byte_of_a_shard_is_found(runs, tmp_path):
    folder = tmp_path / "checkpoints" / "step_6"
    shutil.copytree(runs[1] / "checkpoints" / "step_6", folder)
    shard = sorted(folder.glob("model/*"))[1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=f"{shard.name}: content does not match the hash"):
        RunFolder(tmp_path).newest_checkpoint()
