"""A process gets SIGKILL at a random step, and the run that continues it ends with the same bits."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fourbits.settings import dump_yaml, to_dict
from fourbits.train.checkpoint import checkpoints
from fourbits.train.metrics import MEASURED, read_metrics
from fourbits.train.run import run
from fourbits.train.stop import StopRequest

PATIENCE = 120  # seconds


@pytest.fixture(scope="module")
def command(config, texts, tmp_path_factory):
    """The command line of the run; the standard library would take longer to prepare than to train on."""
    file = tmp_path_factory.mktemp("config") / "run.yaml"
    file.write_text(dump_yaml(to_dict(config)))
    start = "import sys; from fourbits.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", start, "train", str(file)]


def kill_after_step(command: list[str], out: Path, step: int) -> None:
    """Start a run and end it by SIGKILL once the metrics show `step`, wherever it is by then."""
    with subprocess.Popen(
        [*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + PATIENCE
        metrics = out / "metrics.jsonl"
        while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.kill()
        assert process.wait() == -signal.SIGKILL


def test_a_killed_run_ends_with_the_bits_of_an_uninterrupted_one(command, config, data_cache, tmp_path):
    out, uninterrupted = tmp_path / "killed", tmp_path / "uninterrupted"
    for step in sorted(random.Random(20).sample(range(2, config.train.num_steps - 1), 2)):
        kill_after_step(command, out, step)
        assert not (out / "summary.json").exists()
    finished = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=PATIENCE)
    assert finished.returncode == 0, finished.stderr
    assert "continuing from" in finished.stderr
    run(config, uninterrupted, stop=StopRequest(), data_cache=data_cache)
    ends = [checkpoints(folder / "checkpoints")[-1] for folder in (out, uninterrupted)]
    assert [end.name for end in ends] == [f"step_{config.train.num_steps}"] * 2
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes(), name
    assert timeless(out) == timeless(uninterrupted)


def timeless(out):
    return [
        {key: value for key, value in record.items() if key not in MEASURED}
        for record in read_metrics(out / "metrics.jsonl")
    ]
