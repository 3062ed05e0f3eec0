"""Several ranks roll back together: to the state, and with the records, of one process that does."""

import subprocess
import sys

import pytest

import support.spiking
from fourbits.settings import override
from fourbits.train.load_run import open_trained
from fourbits.train.metrics import read_history
from fourbits.train.run import run
from fourbits.train.stop import StopRequest
from support.spiking import INFINITE, SPIKE, SPIKED, inject, of_data
from support.torchrun import PATIENCE, environment, timeless, written

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", [SPIKED, INFINITE])
def test_two_ranks_roll_back_as_one_process_does(config, data_cache, tmp_path, monkeypatch, kind):
    settings = {"checkpoint_interval": 3, "rollback_steps": 2, "spike": "rollback", "non_finite": "rollback"}
    changes = {f"train.{name}": value for name, value in settings.items()}
    rolling = override(config, {**changes, "optim.grad_clip": None})
    words = ["train", written(rolling, tmp_path), "--out", str(tmp_path / "two")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*launcher, support.spiking.__file__, kind, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    inject(monkeypatch.setattr, kind, of_data)
    run(rolling, tmp_path / "one", stop=StopRequest(), data_cache=data_cache)
    one, two = (open_trained(tmp_path / name) for name in ("one", "two"))
    assert all(master.equal(two.masters[name]) for name, master in one.masters.items())
    assert timeless(tmp_path / "two", "grad_norm") == timeless(tmp_path / "one", "grad_norm")
    found = [read_history(tmp_path / name / "metrics.jsonl").rollbacks for name in ("one", "two")]
    assert found[0] == found[1]
    assert [(each["step"], each["to"]) for each in found[0]] == [(SPIKE, 6)]
