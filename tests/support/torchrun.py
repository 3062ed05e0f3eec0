"""`fourbits train` under torchrun, on CPUs."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fourbits.settings import dump_yaml, to_dict
from fourbits.train.config import RunConfig
from fourbits.train.metrics import MEASURED, read_metrics

PATIENCE = 240  # seconds


def command_of(ranks: int, words: Sequence[str], *options: str) -> list[str]:
    """The command line of torchrun. words: after `fourbits`; options: of torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), *options, "-m", "fourbits", *words]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(
    ranks: int, words: Sequence[str], *options: str, patience: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """Run it to its end. patience: seconds."""
    command = command_of(ranks, words, *options)
    return subprocess.run(command, capture_output=True, text=True, timeout=patience, env=environment())


def written(config: RunConfig, folder: Path) -> str:
    """A YAML file of the settings."""
    file = folder / "run.yaml"
    file.write_text(dump_yaml(to_dict(config)))
    return str(file)


def timeless(out: Path, *ignored: str) -> list[dict[str, Any]]:
    """The records of a run without what depends on the machine's speed."""
    return [
        {key: value for key, value in record.items() if key not in (*MEASURED, *ignored)}
        for record in read_metrics(out / "metrics.jsonl")
    ]
