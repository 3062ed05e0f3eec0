"""Signals: the first one ends a run cleanly, the second Ctrl-C at once."""

import json
import os
import signal
import threading
from dataclasses import replace

import pytest

from fourbits.train import stop
from fourbits.train.checkpoint import checkpoints
from fourbits.train.listener import RunListener
from fourbits.train.presets import RUN_PRESETS
from fourbits.train.run import run
from fourbits.train.stop import Clock, stop_on_signals


class Sender(RunListener):
    """Sends signals to this process after step 3."""

    def __init__(self, *signals):
        self.signals = signals
        self.notes: list[str] = []

    def note(self, text):
        self.notes.append(text)

    def step(self, record):
        if record["step"] == 3:
            for number in self.signals:
                os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_finishes_the_step_and_saves(config, data_cache, tmp_path, number):
    handler = signal.getsignal(number)
    summary = run(config, tmp_path, listener=Sender(number), data_cache=data_cache)
    assert (summary["ended"], summary["reason"], summary["steps"]) == ("interrupted", number.name, 3)
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step_3"]
    assert signal.getsignal(number) == handler


def test_a_second_ctrl_c_ends_at_once_without_saving(config, data_cache, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path, listener=Sender(signal.SIGINT, signal.SIGINT), data_cache=data_cache)
    assert json.loads((tmp_path / "summary.json").read_text())["ended"] == "interrupted"
    assert checkpoints(tmp_path / "checkpoints") == []


def test_a_run_outside_the_main_thread_leaves_signals_alone(config, data_cache, tmp_path):
    handler, ended = signal.getsignal(signal.SIGINT), []
    short = replace(config, train=replace(config.train, steps=1))
    thread = threading.Thread(
        target=lambda: ended.append(run(short, tmp_path, data_cache=data_cache)["ended"])
    )
    thread.start()
    thread.join()
    assert ended == ["finished"]
    assert signal.getsignal(signal.SIGINT) == handler


def test_a_signal_while_the_stream_is_busy_is_not_lost():
    def busy(text):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    with stop_on_signals(busy) as request:
        os.kill(os.getpid(), signal.SIGTERM)
    assert request.signal == signal.SIGTERM


def test_the_first_ctrl_c_says_what_a_second_one_does():
    notes = []
    with stop_on_signals(notes.append) as request:
        os.kill(os.getpid(), signal.SIGINT)
    assert request.requested
    assert notes == ["stopping after this step; Ctrl-C again stops at once, without saving"]


def saved(out):
    return [path.name for path in checkpoints(out / "checkpoints")]


def test_sigusr1_saves_and_the_run_goes_on(config, data_cache, tmp_path):
    everything = replace(config, train=replace(config.train, steps=6, keep_checkpoints=9))
    sender = Sender(signal.SIGUSR1)
    summary = run(everything, tmp_path, listener=sender, data_cache=data_cache)
    assert "saving after this step, then continuing" in sender.notes
    assert (summary["ended"], saved(tmp_path)) == ("finished", ["step_3", "step_5", "step_6"])


def test_an_ignored_hangup_stays_ignored(config, data_cache, tmp_path):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        short = replace(config, train=replace(config.train, steps=4))
        assert (
            run(short, tmp_path, listener=Sender(signal.SIGHUP), data_cache=data_cache)["ended"] == "finished"
        )
    finally:
        signal.signal(signal.SIGHUP, before)


class Watch(RunListener):
    """A clock that shows one minute more after each step."""

    minutes = 0.0

    def monotonic(self):
        return 60.0 * self.minutes

    def step(self, record):
        self.minutes += 1.0


@pytest.fixture
def timed(config, data_cache, tmp_path, monkeypatch):
    def start(**settings):
        watch = Watch()
        monkeypatch.setattr(stop.time, "monotonic", watch.monotonic)
        timed = replace(config, train=replace(config.train, keep_checkpoints=9, **settings))
        return run(timed, tmp_path, listener=watch, data_cache=data_cache)

    return start


def test_a_run_ends_at_its_time_limit_saved_and_goes_on_from_there(timed, tmp_path):
    summary = timed(time_limit=2.5)
    assert (summary["ended"], summary["reason"], summary["steps"]) == ("interrupted", "train.time_limit", 3)
    assert saved(tmp_path) == ["step_3"]
    assert timed(time_limit=60.0)["ended"] == "finished"


def test_a_run_saves_every_so_many_minutes(timed, tmp_path):
    timed(save_every_minutes=4.0, checkpoint_interval=None)
    assert saved(tmp_path) == ["step_4", "step_8", "step_12"]
    assert not Clock(RUN_PRESETS["tiny"].train, 0.0).save_due()


def test_checkpoints_of_multiples_stay_beside_the_newest(config, data_cache, tmp_path):
    train = replace(config.train, checkpoint_interval=1, keep_checkpoints=1, keep_every=4, steps=9)
    run(replace(config, train=train), tmp_path, data_cache=data_cache)
    assert saved(tmp_path) == ["step_4", "step_8", "step_9"]
