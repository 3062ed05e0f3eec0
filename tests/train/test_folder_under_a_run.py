"""A run whose folder, a file in it or its lock is taken away, and one whose machine changes."""

import json
import shutil
import signal

import pytest
import torch

from fourbits.train.checkpoint import checkpoints
from fourbits.train.listener import RunListener
from fourbits.train.metrics import FolderChangedError
from fourbits.train.run import run
from fourbits.train.stop import StopRequest


class Act(RunListener):
    """Does something after a step, and keeps the notes."""

    def __init__(self, after, act):
        self.after, self.act, self.notes = after, act, []

    def step(self, record):
        if record["step"] == self.after:
            self.act()

    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def train(config, data_cache):
    def start(out, after=None, act=lambda: None, stop=None):
        listener = Act(after, act)
        run(config, out, listener=listener, stop=stop or StopRequest(), data_cache=data_cache)
        return listener.notes

    return start


TAKEN = {
    "folder removed": lambda out: shutil.rmtree(out),
    "folder moved": lambda out: out.rename(out.with_name("elsewhere")),
    "metrics rotated": lambda out: (out / "metrics.jsonl").rename(out / "metrics.jsonl.1"),
    "lock removed": lambda out: (out / ".lock").unlink(),
}


@pytest.mark.parametrize("step", [6, 9, 12])  # before a line, before a checkpoint, and after the last step
@pytest.mark.parametrize("what", TAKEN)
def test_a_removed_folder_file_or_lock_is_noticed_and_the_run_does_not_finish(train, tmp_path, what, step):
    out = tmp_path / "run"
    with pytest.raises(FolderChangedError, match="was moved, removed or replaced"):
        train(out, step, lambda: TAKEN[what](out))
    for path in (out, tmp_path / "elsewhere"):
        if (path / "summary.json").exists():
            assert json.loads((path / "summary.json").read_text())["ended"] == "failed"
    assert out.exists() == ("folder" not in what), "the run does not make its folder again"


def test_a_run_continues_in_its_moved_folder(train, tmp_path):
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    with pytest.raises(FolderChangedError):
        train(out, 6, lambda: out.rename(elsewhere))
    train(elsewhere)
    assert checkpoints(elsewhere / "checkpoints")[-1].name == "step_12"


def test_every_process_of_a_run_is_recorded_and_a_change_is_reported(train, tmp_path, monkeypatch):
    stop = StopRequest()
    train(tmp_path, 3, lambda: setattr(stop, "signal", signal.SIGTERM), stop)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    (note,) = [note for note in train(tmp_path) if "resumes with" in note]
    assert note.startswith("resumes with threads 7 instead of 1: the result may differ in the last bits")
    sessions = json.loads((tmp_path / "manifest.json").read_text())["sessions"]
    assert [(each["first_step"], each["threads"]) for each in sessions] == [(1, 1), (4, 7)]
