"""SIGUSR2 to one of two ranks: both record the same step, and the run has the bits of an undisturbed one."""

import gzip
import json
import os
import re
import signal

import pytest

from fourbits.settings import override
from fourbits.train.load_run import open_trained
from fourbits.train.run import run
from fourbits.train.stop import StopRequest
from support.launched import Launched
from support.torchrun import timeless, written


@pytest.fixture(scope="module")
def unclipped(config):
    """Without clipping, whose factor is a norm over shards: two ranks then have the bits of one process."""
    return override(config, {"optim.grad_clip": None, "train.steps": 40, "train.validation_interval": 20})


def process_of(log):
    found = re.search(r"process (\d+) on", log.read_text())
    assert found is not None
    return int(found[1])


def test_a_signal_to_rank_1_records_one_step_on_both_ranks_and_changes_no_bit(
    unclipped, data_cache, tmp_path
):
    launched = Launched(tmp_path, written(unclipped, tmp_path))
    launched.wait_for(lambda: launched.reached(3))
    logs = [launched.out / "log.txt", launched.out / "logs" / "rank_1.txt"]
    os.kill(process_of(logs[1]), signal.SIGUSR2)
    code, errors = launched.end()
    assert code == 0, errors
    (folder,) = (launched.out / "profiles").iterdir()
    traces = [folder / f"trace_rank{rank}.json.gz" for rank in range(2)]
    assert sorted(folder.iterdir()) == traces
    for rank, (trace, log) in enumerate(zip(traces, logs, strict=True)):
        names = {event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
        assert {"_QuantizedMatmulBackward", "gloo:all_gather"} <= names
        assert f"{folder.name.replace('_', ' ')}: recorded in {folder}: {trace.name}" in log.read_text()
        assert ("recording the next step" in log.read_text()) == (rank == 1)
    run(unclipped, tmp_path / "one", stop=StopRequest(), data_cache=data_cache)
    assert timeless(launched.out, "grad_norm") == timeless(tmp_path / "one", "grad_norm")
    one, two = (open_trained(out) for out in (tmp_path / "one", launched.out))
    assert all(master.equal(two.masters[name]) for name, master in one.masters.items())
