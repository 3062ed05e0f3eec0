"""A process gets SIGKILL at a random step, and the run that continues it ends with the same bits.

FOURBITS_KILLS sets how often the slow test, of compiled regions, kills (default 4).
"""

import os
import random

import pytest

from fourbits.settings import override
from fourbits.train.run import run
from fourbits.train.stop import StopRequest
from support.kills import FOURBITS, finish, kill_after_step, kill_at_random, same_end
from support.torchrun import timeless, written

KILLS = int(os.environ.get("FOURBITS_KILLS", "4"))


@pytest.fixture(scope="module")
def command(config, texts, tmp_path_factory):
    """The command line of the run; the standard library would take longer to prepare than to train on."""
    return [*FOURBITS, "train", written(config, tmp_path_factory.mktemp("config"))]


def test_a_killed_run_ends_with_the_bits_of_an_uninterrupted_one(command, config, data_cache, tmp_path):
    out, uninterrupted = tmp_path / "killed", tmp_path / "uninterrupted"
    for step in sorted(random.Random(20).sample(range(2, config.train.num_steps - 1), 2)):
        kill_after_step(command, out, step)
        assert not (out / "summary.json").exists()
    assert "continuing from" in finish(command, out)
    run(config, uninterrupted, stop=StopRequest(), data_cache=data_cache)
    same_end(out, uninterrupted)
    assert timeless(out) == timeless(uninterrupted)


@pytest.mark.slow
def test_a_killed_run_of_compiled_regions_ends_with_the_bits_of_an_uninterrupted_one(config, tmp_path):
    compiled = {"train.compile": "regions", "train.steps": 40, "train.checkpoint_interval": 3}
    command = [*FOURBITS, "train", written(override(config, compiled), tmp_path)]
    finish(command, tmp_path / "uninterrupted")
    kill_at_random(command, tmp_path / "killed", steps=40, kills=KILLS, seed=7)
    assert "continuing from" in finish(command, tmp_path / "killed")
    same_end(tmp_path / "killed", tmp_path / "uninterrupted")
    assert timeless(tmp_path / "killed") == timeless(tmp_path / "uninterrupted")
