"""Processes that train, killed by SIGKILL once they have reached a step."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PATIENCE = 240  # seconds

#: the command line of fourbits, by this Python
FOURBITS = (sys.executable, "-m", "fourbits")


def kill_after_step(command: Sequence[str], out: Path, step: int, seconds: float = 0.0) -> None:
    """Start a run and end it by SIGKILL, `seconds` after the metrics show `step`, wherever it is by then."""
    with subprocess.Popen(
        [*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + PATIENCE
        metrics = out / "metrics.jsonl"
        while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(seconds)
        process.kill()
        assert process.wait() == -signal.SIGKILL


def kill_at_random(command: Sequence[str], out: Path, steps: int, kills: int, seed: int) -> None:
    """Kill the run `kills` times at random moments of its `steps` steps, each time further on."""
    rng = random.Random(seed)
    for step in sorted(rng.sample(range(2, steps - steps // 8), kills)):
        kill_after_step(command, out, step, rng.uniform(0, 0.1))
        assert not (out / "summary.json").exists()


def finish(command: Sequence[str], out: Path) -> str:
    """Run the command to its end, and return what it printed on stderr."""
    ended = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def same_end(one: Path, other: Path) -> None:
    """The last checkpoints of two runs are of the same step and hold equal bytes."""
    ends = [sorted((out / "checkpoints").glob("step_*"), key=_step)[-1] for out in (one, other)]
    assert ends[0].name == ends[1].name
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes(), f"{ends[0]}: {name}"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
