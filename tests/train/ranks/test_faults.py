"""Ranks are killed, stopped and asked to end, and a run ends with the bits of an undisturbed one.

FOURBITS_KILLS sets how often the test of kills kills (default 3).
"""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fourbits.settings import override
from fourbits.train.load_run import open_trained
from support.launched import Launched
from support.torchrun import PATIENCE, command_of, environment, timeless, torchrun, written

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("FOURBITS_KILLS", "3"))
STEPS = max(40, 12 * KILLS)
#: seconds for all steps, on a machine with other work
LONG = PATIENCE + STEPS


@pytest.fixture(scope="module")
def steady(config):
    """Ranks with a clipped norm and a recipe with state; saves often, so that kills meet saves."""
    changes = {
        "train.steps": STEPS,
        "train.checkpoint_interval": 2,
        "train.validation_interval": 10,
    }
    return override(config, {**changes, "recipe.fprop.lhs.amax_policy": "history"})


@pytest.fixture(scope="module")
def file(steady, tmp_path_factory):
    return written(steady, tmp_path_factory.mktemp("config"))


@pytest.fixture(params=["waiting", "background"])
def saves(request):
    """The options of a run whose training waits for its saves, and of one that saves in the background."""
    return ["--train.background_saves", "true"] if request.param == "background" else []


def killed(launched, kills, rng):
    """Kill random ranks at random moments: while they start, train, or save.

    Between two kills a run makes fewer steps than it has per kill, so it lasts until the last one.
    """
    for _ in range(kills):
        launched.wait_for(lambda: launched.rank(1) is not None)
        victim = launched.running(rng.randrange(2))
        launched.wait_until(time.monotonic() + rng.uniform(0, 12), rng.randrange(1, 9))
        time.sleep(rng.uniform(0, 0.1))
        os.kill(victim, signal.SIGKILL)
        launched.wait_for(lambda victim=victim: victim not in (launched.rank(0), launched.rank(1)))


def test_a_run_whose_ranks_are_killed_has_the_bits_of_an_undisturbed_one(file, saves, tmp_path):
    undisturbed = torchrun(2, ["train", file, "--out", str(tmp_path / "whole")], patience=LONG)
    assert undisturbed.returncode == 0, undisturbed.stderr
    launched = Launched(tmp_path, file, *saves, options=["--max-restarts", str(KILLS)])
    killed(launched, KILLS, random.Random(3))
    code, errors = launched.end(LONG)
    assert code == 0, errors
    assert errors.count("exitcode: -9") == KILLS
    one, two = (open_trained(out) for out in (tmp_path / "whole", launched.out))
    assert all(master.equal(two.masters[name]) for name, master in one.masters.items())
    assert timeless(launched.out) == timeless(tmp_path / "whole")


def test_sigterm_saves_on_all_ranks_and_is_not_restarted(file, saves, tmp_path):
    launched = Launched(tmp_path, file, *saves, options=["--max-restarts", "3"])
    launched.wait_for(lambda: launched.reached(7))
    launched.process.send_signal(signal.SIGTERM)
    code, _ = launched.end(LONG)
    summary = json.loads((launched.out / "summary.json").read_text())
    assert code != 0
    assert (summary["ended"], summary["reason"]) == ("interrupted", "SIGTERM")
    assert (launched.out / "checkpoints" / f"step_{summary['steps']}").is_dir()


def test_a_time_limit_is_not_restarted(file, tmp_path):
    launched = Launched(tmp_path, file, "--train.time_limit", "0.0001", options=["--max-restarts", "1"])
    code, errors = launched.end(LONG)
    assert code != 0
    assert "exitcode: 124" in errors
    assert json.loads((launched.out / "summary.json").read_text())["steps"] == 1


def test_a_lost_rank_is_named_once(file, tmp_path):
    launched = Launched(tmp_path, file)
    launched.wait_for(lambda: launched.reached(3))
    os.kill(launched.running(1), signal.SIGKILL)
    code, errors = launched.end(LONG)
    assert code != 0
    assert errors.count("fourbits train: rank") == 1
    assert "fourbits train: rank 0 on " in errors
    assert ": lost rank 1 on " in errors
    summary = json.loads((launched.out / "summary.json").read_text())
    assert summary["ended"] == "failed"
    assert summary["reason"].startswith("LostRankError: lost rank 1 on ")
    assert ": lost rank 1 on " in (launched.out / "log.txt").read_text().splitlines()[-1]


def test_the_summary_names_the_error_of_a_rank_that_fails_by_itself(file, tmp_path):
    """Not the connection that broke when the rank ended."""
    program = Path(__file__).with_name("failing_step.py")
    command = command_of(2, [str(program), "train", file, "--out", str(tmp_path / "run")])
    place = command.index("fourbits")
    del command[place - 1 : place + 1]  # a program in the place of `-m fourbits`
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment())
    assert ended.returncode != 0
    assert ended.stderr.count("fourbits train: rank") == 1
    assert "fourbits train: rank 1 on " in ended.stderr
    reason = json.loads((tmp_path / "run" / "summary.json").read_text())["reason"]
    assert reason.startswith("OtherRankError: rank 1 on ")
    assert reason.endswith(" failed: KeyError: 'a batch without labels'")


def test_a_stopped_rank_is_named_within_the_timeout(file, tmp_path):
    launched = Launched(tmp_path, file, "--parallel.timeout", "3", "--train.steps", "4000")
    launched.wait_for(lambda: launched.reached(3))
    stopped, begin = launched.running(1), time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    launched.wait_for(lambda: "rank 1 on" in launched.errors.read_text())
    assert time.monotonic() - begin < 15  # the timeout, and the seconds in which heartbeats are awaited
    os.kill(stopped, signal.SIGCONT)
    code, errors = launched.end(LONG)
    assert code != 0
    assert "no progress for 3 s (parallel.timeout): rank 1 on" in errors
    assert "does not respond" in errors


def test_a_loss_that_is_not_finite_is_reported_once(file, tmp_path):
    ended = torchrun(2, ["train", file, "--out", str(tmp_path / "run"), "--optim.lr", "1e30"])
    assert ended.returncode != 0
    assert ended.stderr.count("fourbits train: rank") == 1
    assert "rank 0 on" in ended.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ended"] == "non-finite"


def test_a_full_disk_in_a_save_is_reported_once_and_earlier_checkpoints_stay(file, saves, tmp_path):
    """The system's limit on a file's size stands for the disk; shards of the optimizer exceed it."""
    assert torchrun(2, ["train", file, "--out", str(tmp_path / "run"), "--train.steps", "2"]).returncode == 0
    words = ["train", file, "--out", str(tmp_path / "run"), "--train.steps", "4", *saves]
    limited = ["bash", "-c", 'ulimit -f 150 && exec "$@"', "limited", *command_of(2, words)]
    ended = subprocess.run(limited, capture_output=True, text=True, timeout=PATIENCE, env=environment())
    assert ended.returncode != 0
    assert ended.stderr.count("fourbits train: rank") == 1
    assert "step_4: File too large; step 4 was not saved, earlier checkpoints are intact" in ended.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_2"]
