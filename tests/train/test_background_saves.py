"""A background save has the state of the moment it began, complete or absent; its failure is reported."""

import errno
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from fourbits.settings import dump_yaml, override, to_dict
from fourbits.train import checkpoint
from fourbits.train.background import BackgroundSaver
from fourbits.train.checkpoint import checkpoints, load_tensors, open_checkpoint, save_checkpoint
from fourbits.train.keeper import CheckpointKeeper
from fourbits.train.load_run import open_trained
from fourbits.train.ranks.ranks import Ranks
from fourbits.train.run import run
from fourbits.train.stop import StopRequest

PATIENCE = 60  # seconds

#: a run whose save of step 4 writes its first file, and no second one. Arguments: YAML file, run folder, data
HANGS = """
import sys, threading
from pathlib import Path
from fourbits.train import checkpoint
from fourbits.train.config import load_config
from fourbits.train.run import run
from fourbits.train.stop import StopRequest
file, out, data = sys.argv[1:]
write = checkpoint._write_tensors
def hanging(path, tensors):
    if path.parent.name.endswith("step_4") and path.name.startswith("optimizer"):
        threading.Event().wait()
    return write(path, tensors)
checkpoint._write_tensors = hanging
run(load_config(file, {}), Path(out), stop=StopRequest(), data_cache=Path(data))
"""


class Gate:
    """Writes checkpoints, each when a test releases it; fails where a test says so."""

    def __init__(self):
        self.open, self.begun, self.error = threading.Event(), threading.Event(), None

    def __call__(self, *args):
        self.begun.set()
        assert self.open.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return save_checkpoint(*args)


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def keeper(gate, tmp_path):
    saver = BackgroundSaver(gate, Ranks(torch.device("cpu")))
    return CheckpointKeeper(tmp_path, 1, None, None, background=saver)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def files(value):
    return {"model": {"w": torch.full((4, 3), value), "step": torch.tensor(value)}}


def test_a_save_holds_what_the_tensors_were_when_it_began(keeper, gate, tmp_path):
    saved = files(1.0)
    keeper.save(1, saved, {"next": 5})
    assert gate.begun.wait(PATIENCE)
    for tensor in saved["model"].values():
        tensor.fill_(2.0)
    gate.open.set()
    keeper.settle()
    found = open_checkpoint(tmp_path / "step_1")
    assert found.state == {"next": 5}
    assert all(bool((x == 1.0).all()) for x in load_tensors(found, "model", saved["model"]).values())


def test_the_old_checkpoint_stays_until_the_new_one_is_complete_and_proved(keeper, gate, tmp_path):
    gate.open.set()
    keeper.save(1, files(1.0), {})
    keeper.settle()
    gate.open.clear()
    keeper.save(3, files(3.0), {})
    (tmp_path / ".unfinished-step_3").mkdir()  # what the writer has made by now
    keeper.proved(4)
    assert names(tmp_path) == [".unfinished-step_3", "step_1"]
    gate.open.set()
    keeper.settle()
    assert names(tmp_path) == ["step_1", "step_3"]
    keeper.proved(5)
    assert names(tmp_path) == ["step_3"]


@pytest.mark.parametrize("learns", ["the next step", "the next save", "the end"])
def test_a_failure_is_raised_where_training_learns_of_it(keeper, gate, tmp_path, learns):
    gate.open.set()
    keeper.save(1, files(1.0), {})
    keeper.settle()
    gate.error = OSError(errno.ENOSPC, "full")
    keeper.save(2, files(2.0), {})
    keeper._background._thread.join(PATIENCE)
    actions = {
        "the next step": lambda: keeper.proved(3),
        "the next save": lambda: keeper.save(4, files(4.0), {}),
        "the end": keeper.remove_old,
    }
    with pytest.raises(OSError, match="full"):
        actions[learns]()
    assert names(tmp_path) == ["step_1"]


def test_what_is_not_finite_is_not_saved(keeper, gate):
    gate.open.set()
    keeper.save(1, files(float("nan")), {})
    with pytest.raises(checkpoint.NonFiniteError, match="No checkpoint of it was written"):
        keeper.settle()


def test_a_run_that_saves_in_the_background_has_the_checkpoints_of_one_that_waits(
    config, data_cache, tmp_path
):
    changes = {"train.checkpoint_interval": 2, "train.keep_checkpoints": 3}
    for name, background in (("waits", False), ("goes_on", True)):
        settings = override(config, {**changes, "train.background_saves": background})
        summary = run(settings, tmp_path / name, stop=StopRequest(), data_cache=data_cache)
        assert summary["ended"] == "finished"
    one, two = (checkpoints(tmp_path / name / "checkpoints") for name in ("waits", "goes_on"))
    assert [path.name for path in one] == [path.name for path in two]
    for mine, other in zip(one, two, strict=True):
        assert open_checkpoint(mine).files == open_checkpoint(other).files


def test_the_last_save_is_complete_when_the_run_ends(config, data_cache, tmp_path, monkeypatch):
    """As after SIGTERM: the run waits for its save, however long it takes."""
    begun = threading.Event()

    def slow(folder, step, files, state):
        begun.set()
        threading.Event().wait(0.3)
        return save_checkpoint(folder, step, files, state)

    monkeypatch.setattr("fourbits.train.ranks.ranks.save_checkpoint", slow)
    stop = StopRequest()
    stop.signal = signal.SIGTERM
    settings = override(config, {"train.background_saves": True})
    summary = run(settings, tmp_path / "run", stop=stop, data_cache=data_cache)
    assert begun.is_set()
    assert (summary["ended"], summary["steps"]) == ("interrupted", 1)
    assert open_trained(tmp_path / "run").step == 1


def test_a_save_that_fails_ends_the_run_and_says_so(config, data_cache, tmp_path, monkeypatch):
    def full(folder, step, files, state):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr("fourbits.train.ranks.ranks.save_checkpoint", full)
    settings = override(config, {"train.background_saves": True, "train.checkpoint_interval": 1})
    with pytest.raises(OSError, match="No space left"):
        run(settings, tmp_path / "run", stop=StopRequest(), data_cache=data_cache)
    assert '"ended": "failed"' in (tmp_path / "run" / "summary.json").read_text()


def test_sigkill_during_a_save_leaves_the_checkpoint_before_it_and_the_run_goes_on_from_there(
    config, data_cache, tmp_path
):
    changes = {"train.checkpoint_interval": 2, "train.keep_checkpoints": 1, "train.background_saves": True}
    settings = override(config, {**changes, "train.steps": 5})
    run(settings, tmp_path / "whole", stop=StopRequest(), data_cache=data_cache)
    out, file = tmp_path / "killed", tmp_path / "run.yaml"
    file.write_text(dump_yaml(to_dict(settings)))
    process = subprocess.Popen([sys.executable, "-c", HANGS, str(file), str(out), str(data_cache)])
    saves, metrics = out / "checkpoints", out / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
    while not (metrics.exists() and '"step": 5,' in metrics.read_text()):  # trained on during the save
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert names(saves) == [".unfinished-step_4", "step_2"]
    assert run(settings, out, stop=StopRequest(), data_cache=data_cache)["ended"] == "finished"
    assert names(saves) == ["step_5"]
    one, two = (open_trained(each) for each in (tmp_path / "whole", out))
    assert all(master.equal(two.masters[name]) for name, master in one.masters.items())
