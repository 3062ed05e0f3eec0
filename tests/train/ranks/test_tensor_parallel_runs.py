"""Runs of ranks that share layers: killed and resumed, and continued on other numbers of ranks."""

import json
import shutil
from dataclasses import replace

import pytest

from fourbits.settings import override
from fourbits.train.checkpoint import open_checkpoint
from fourbits.train.run import run
from fourbits.train.stop import StopRequest
from support.torchrun import timeless, torchrun, written
from train.ranks.test_resharding import contents
from train.ranks.test_tensor_parallel import MODEL

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(config, data_cache, tmp_path_factory):
    """(folder, settings): "one", of a process, and "pair", of two ranks that go on after its second step."""
    changes = {"train.steps": 4, "train.checkpoint_interval": 2, "train.keep_checkpoints": 9}
    changes |= {"train.health_interval": 2, "train.background_saves": True}
    settings = override(replace(config, model=MODEL), changes)
    folder = tmp_path_factory.mktemp("runs")
    run(settings, folder / "one", stop=StopRequest(), data_cache=data_cache)
    shared_by(2, settings, folder, "pair", "--from", str(folder / "one/checkpoints/step_2"))
    return folder, settings


def shared_by(ranks, settings, folder, out, *words):
    """Train with pairs of ranks that share layers."""
    file = written(override(settings, {"parallel.tensor": 2}), folder)
    ended = torchrun(ranks, ["train", file, "--out", str(folder / out), *words])
    assert ended.returncode == 0, ended.stderr


def state(folder, out, step):
    return contents(open_checkpoint(folder / out / f"checkpoints/step_{step}"))


def assert_equal(one, two):
    assert one.keys() == two.keys()
    assert all(tensor.equal(two[key]) for key, tensor in one.items())


def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(runs):
    folder, settings = runs
    shutil.copytree(folder / "pair", folder / "again")
    shutil.rmtree(folder / "again/checkpoints/step_4")
    (folder / "again/summary.json").unlink()
    shared_by(2, settings, folder, "again")
    assert_equal(state(folder, "pair", 4), state(folder, "again", 4))
    assert timeless(folder / "again") == timeless(folder / "pair")


def test_a_state_is_the_same_on_1_2_4_and_1_ranks(runs, data_cache):
    folder, settings = runs
    shared_by(4, settings, folder, "four", "--from", str(folder / "pair/checkpoints/step_2"))
    last = folder / "four/checkpoints/step_2"
    run(settings, folder / "end", stop=StopRequest(), data_cache=data_cache, start_from=last)
    for out in ("pair", "four", "end"):
        assert_equal(state(folder, "one", 2), state(folder, out, 2))
    assert timeless(folder / "end") == timeless(folder / "one")


def test_the_manifest_names_the_mesh(runs):
    folder, _ = runs
    manifest = json.loads((folder / "pair/manifest.json").read_text())
    assert manifest["parallel"]["mesh"] == {"replicate": 1, "shard": 1, "tensor": 2}
    one = json.loads((folder / "one/manifest.json").read_text())
    assert manifest["hashes"] == one["hashes"]
