"""Metrics go to every sink; a sink that fails costs its own chart and nothing else."""

import csv
import json
import signal
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fourbits.cli.main import main
from fourbits.train import sinks
from fourbits.train.listener import RunListener
from fourbits.train.metrics import read_metrics
from fourbits.train.run import run
from fourbits.train.sinks import register_sink
from fourbits.train.stop import StopRequest
from support.documented import names_of
from support.stopper import Stopper


class Memory:
    """A sink from outside of the package."""

    def __init__(self, fails_at=None):
        self.begun: Any = None
        self.rows, self.ended, self.fails_at = [], None, fails_at

    def begin(self, run):
        self.begun = run

    def write(self, step, metrics):
        if step == self.fails_at:
            raise ConnectionError("no network")
        self.rows.append((step, dict(metrics)))

    def end(self, ended):
        self.ended = ended


class Notes(RunListener):
    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)


@pytest.fixture
def register(monkeypatch):
    monkeypatch.setattr(sinks, "_FACTORIES", {})
    return register_sink


@pytest.fixture
def train(config, data_cache, tmp_path):
    def start(*names, stop=None, listener=None, **settings):
        changed = replace(config, train=replace(config.train, sinks=names, **settings))
        return run(
            changed, tmp_path / "run", listener=listener, stop=stop or StopRequest(), data_cache=data_cache
        )

    return start


def test_a_registered_sink_gets_the_finite_numbers_of_every_step_and_validation(register, train, tmp_path):
    sink = Memory()
    register("memory", lambda: sink)
    train("memory")
    assert (sink.begun.folder, sink.begun.step, sink.ended) == (tmp_path / "run", 0, "finished")
    assert sink.begun.config["optim"]["lr"] == 1e-2
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [step for step, _ in sink.rows] == [record["step"] for record in records]
    for (_, row), record in zip(sink.rows, records, strict=True):
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
        assert row == {key: value for key, value in numbers.items() if key != "step"}


def test_a_resumed_run_gives_its_sinks_its_step(register, train):
    made = []
    register("memory", lambda: made.append(Memory()) or made[-1])
    stop = StopRequest()
    stop.signal = signal.SIGINT
    train("memory", stop=stop)
    train("memory")
    assert [(sink.begun.step, sink.ended) for sink in made] == [(0, "interrupted"), (1, "finished")]


def test_a_sink_that_fails_is_dropped_and_reported_once_and_the_others_continue(register, train, tmp_path):
    broken, sound = Memory(fails_at=3), Memory()
    register("broken", lambda: broken)
    register("sound", lambda: sound)
    notes = Notes()
    assert train("broken", "sound", listener=notes)["ended"] == "finished"
    assert [step for step, _ in broken.rows] == [1, 2]
    assert broken.ended is None
    assert sound.ended == "finished"
    text = "sink broken: ConnectionError: no network. The run continues without it."
    assert [note for note in notes.said if "sink" in note] == [text]
    assert (tmp_path / "run" / "log.txt").read_text().count(text) == 1


def test_unknown_names_and_missing_packages_are_errors_before_anything_is_created(
    register, train, tmp_path, monkeypatch
):
    register("memory", Memory)
    with pytest.raises(ValueError, match=r"unknown sink 'tensorbord'.*Did you mean 'tensorboard'"):
        train("tensorbord")
    for missing in (None, ModuleType("wandb")):  # not installed; a folder of that name
        monkeypatch.setitem(sys.modules, "wandb", missing)
        with pytest.raises(ValueError, match=r"needs the package wandb.*pip install wandb"):
            train("wandb")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ValueError, match=r"pip install 'fourbits\[tb\]'"):
        train("tensorboard")
    assert not (tmp_path / "run").exists()
    for name in ("memory", "wandb"):
        with pytest.raises(ValueError, match=f"'{name}' is registered already"):
            register(name, Memory)


def test_wandb_gets_one_run_per_folder(train, tmp_path, monkeypatch):
    calls = []

    class Run:
        id, summary = "abc123", {}

        def log(self, row, step):
            calls.append(("log", step, "loss" in row))

        def finish(self, exit_code):
            calls.append(("finish", exit_code))

    def init(**given):
        calls.append(("init", given["id"], given["name"], given["config"]["train"]["steps"], given["resume"]))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=None))
    stop = StopRequest()
    stop.signal = signal.SIGTERM
    train("wandb", stop=stop)
    train("wandb", steps=12)
    assert [call for call in calls if call[0] != "log"] == [
        ("init", None, "run", 12, "allow"),
        ("finish", 0),
        ("init", "abc123", "run", 12, "allow"),
        ("finish", 0),
    ]
    assert ("log", 12, True) in calls
    assert (tmp_path / "run" / "wandb_id.txt").read_text() == "abc123\n"


def test_tensorboard_hides_what_a_kill_made_void(train, tmp_path, monkeypatch):
    writers = []

    class Writer:
        def __init__(self, folder, purge_step):
            self.purge_step, self.scalars, self.closed = purge_step, [], False
            assert folder == str(tmp_path / "run" / "tensorboard")
            writers.append(self)

        def add_scalar(self, name, value, step):
            self.scalars.append((name, step))

        def add_text(self, name, text):
            self.ended = text

        def flush(self):
            pass

        def close(self):
            self.closed = True

    package = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(writer=package))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", package)
    stop = StopRequest()
    stop.signal = signal.SIGTERM
    train("tensorboard", stop=stop)
    train("tensorboard")
    assert [(w.purge_step, w.ended, w.closed) for w in writers] == [
        (1, "interrupted", True),
        (2, "finished", True),
    ]
    assert ("val_loss", 12) in writers[1].scalars
    assert ("loss", 2) in writers[1].scalars


def test_sinks_may_change_when_a_run_continues(register, train, tmp_path):
    register("memory", Memory)
    stop = StopRequest()
    stop.signal = signal.SIGINT
    train(stop=stop)
    assert train("memory")["ended"] == "finished"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 12


def test_a_run_started_from_another_gives_its_sinks_the_other(register, train, config, data_cache, tmp_path):
    train()
    made = []
    register("memory", lambda: made.append(Memory()) or made[-1])
    for _ in range(2):  # from the other run, then from its own checkpoint
        stop = StopRequest()
        stop.signal = signal.SIGINT
        changed = replace(config, train=replace(config.train, sinks=("memory",)))
        start = tmp_path / "run" / "checkpoints" / "step_10"
        run(changed, tmp_path / "fork", stop=stop, data_cache=data_cache, start_from=start)
    assert [(sink.begun.step, sink.begun.origin) for sink in made] == [
        (10, "from-run-step-10"),
        (11, "from-run-step-10"),
    ]


def test_the_sink_of_the_documentation_has_each_step_once(train, tmp_path):
    assert names_of("A metric sink")
    stopper = Stopper(7)
    train("csv", listener=stopper, stop=stopper.stop)
    with (tmp_path / "run" / "losses.csv").open("a") as file:
        file.write("8,1.0\n9,1.0\n")  # of a process that was killed after step 9, its checkpoint is older
    train("csv")
    losses = [(r["step"], r["loss"]) for r in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in r]
    rows = csv.reader((tmp_path / "run" / "losses.csv").read_text().splitlines())
    assert [(int(step), float(loss)) for step, loss in rows] == losses


def test_a_comparison_refuses_a_sink_before_it_prepares_text(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    code = main(["compare", "tiny", "--out", str(tmp_path / "out"), "--train.sinks", "wandb"])
    assert (code, (tmp_path / "out").exists()) == (2, False)
    assert "pip install wandb" in capsys.readouterr().err
