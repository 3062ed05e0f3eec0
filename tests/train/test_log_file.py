"""log.txt has what a run prints, with times, from every process that trained, and never ends a run."""

import importlib.metadata
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from fourbits.train.listener import RunListener
from fourbits.train.log_file import LogFile
from fourbits.train.run import run
from fourbits.train.stop import StopRequest
from fourbits.version import VERSION

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d "


class Acts(RunListener):
    """Calls a function after one step, and records notes."""

    def __init__(self, after, act):
        self.after, self.act, self.notes = after, act, []

    def note(self, text):
        self.notes.append(text)

    def step(self, record):
        if record["step"] == self.after:
            self.act()


@pytest.fixture
def train(config, data_cache):
    def start(out, after=None, act=lambda: None, stop=None):
        listener = Acts(after, act)
        run(config, out, listener=listener, stop=stop or StopRequest(), data_cache=data_cache)
        return listener

    return start


def test_every_line_has_a_time_and_a_resumed_run_appends(train, tmp_path):
    stop = StopRequest()
    train(tmp_path, 5, lambda: setattr(stop, "signal", signal.SIGTERM), stop)
    first = (tmp_path / "log.txt").read_text()
    train(tmp_path)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert (tmp_path / "log.txt").read_text().startswith(first)
    assert all(re.match(TIME, line) for line in lines)
    texts = [re.sub(TIME, "", line) for line in lines]
    assert sum(text.startswith("=== fourbits ") for text in texts) == 2
    assert "ended: interrupted (SIGTERM) after 5 steps" in texts
    assert "5 of 12 steps done, 128 tokens each" in texts
    assert any(text.startswith("training: step 12/12  validation loss") for text in texts)
    assert texts[-1] == "ended: finished after 12 steps"


def test_a_run_needs_no_installed_metadata_of_fourbits(train, tmp_path, monkeypatch):
    """As from a source tree on PYTHONPATH."""
    found = importlib.metadata.distribution

    def distribution(name):
        if name == "fourbits":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("fourbits")
    train(tmp_path)
    assert f"=== fourbits {VERSION}, torch " in (tmp_path / "log.txt").read_text().splitlines()[0]


def test_warnings_and_errors_are_logged_and_still_shown(train, tmp_path):
    with pytest.warns(UserWarning, match="unusual"):
        train(tmp_path / "warned", 2, lambda: warnings.warn("something unusual", stacklevel=1))
    assert "warning: something unusual" in (tmp_path / "warned/log.txt").read_text()

    def fail():
        raise RuntimeError("the cable was pulled")

    with pytest.raises(RuntimeError):
        train(tmp_path / "failed", 3, fail)
    text = (tmp_path / "failed/log.txt").read_text()
    assert "ended: failed (RuntimeError: the cable was pulled) after 3 steps\n" in text
    assert re.search(rf"{TIME}Traceback .*\n(.*\n)*{TIME}RuntimeError: the cable was pulled\n\Z", text)
    assert all(re.match(TIME, line) for line in text.splitlines())


LOGGING = """
import io, logging, sys
from pathlib import Path
from fourbits.train.log_file import LogFile

logged = sys.argv[1] == "logged"
if sys.argv[2] == "configured":
    logging.basicConfig(format="mine: %(message)s")
log = LogFile(Path(sys.argv[3]), 1, print)
with log.session() if logged else open("/dev/null"):
    for name in ("fourbits", "torch._dynamo.convert_frame", "another"):
        logging.getLogger(name).warning("%s warns", name)
        logging.getLogger(name).info("%s informs", name)
"""


@pytest.mark.parametrize("configured", ["configured", "plain"])
def test_messages_of_loggers_are_logged_and_printed_as_without_a_log(tmp_path, configured):
    printed = {
        logged: subprocess.run(
            [sys.executable, "-c", LOGGING, logged, configured, str(tmp_path / "log.txt")],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        for logged in ("logged", "unlogged")
    }
    plain = {how: re.sub(r"W\d+ [\d:.]+ \d+ ", "", text) for how, text in printed.items()}  # torch's times
    assert plain["logged"] == plain["unlogged"]
    assert printed["logged"].count(" warns") == 3
    texts = [re.sub(TIME, "", line) for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert texts[1:] == ["fourbits warns", "torch._dynamo.convert_frame warns"]


def test_a_log_that_cannot_be_written_is_reported_once_and_the_run_continues(train, tmp_path):
    (tmp_path / "log.txt").mkdir()
    said = [note for note in train(tmp_path).notes if "log.txt" in note]
    assert len(said) == 1
    assert said[0].endswith("The run continues without its log.")
    assert (tmp_path / "summary.json").is_file()


def test_a_log_is_written_again_when_there_is_room(tmp_path: Path):
    said: list[str] = []
    place = tmp_path / "log.txt"
    log = LogFile(place, 1, said.append)
    place.mkdir()
    log.write("lost")
    place.rmdir()
    log.write("kept\nwhole")
    assert [re.sub(TIME, "", line) for line in place.read_text().splitlines()] == ["kept", "whole"]
    assert len(said) == 1
