"""Signals: the first one ends a run cleanly, the second Ctrl-C at once."""

import json
import os
import signal
import threading
from dataclasses import replace

import pytest

from fourbits.train.checkpoint import checkpoints
from fourbits.train.listener import RunListener
from fourbits.train.run import run
from fourbits.train.stop import stop_on_signals


class Sender(RunListener):
    """Sends signals to this process after step 3."""

    def __init__(self, *signals):
        self.signals = signals

    def step(self, record):
        if record["step"] == 3:
            for number in self.signals:
                os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
