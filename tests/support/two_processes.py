"""A script that two processes run at once: rank, a store for their group and a result file as arguments."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

WORLD = 2


def results_of(script: Path, folder: Path) -> list[Any]:
    """What each of the processes wrote by torch.save."""
    store, results = folder / "store", [folder / f"rank{rank}.pt" for rank in range(WORLD)]
    commands = [
        [sys.executable, str(script), str(rank), str(store), str(result)]
        for rank, result in enumerate(results)
    ]
    paths = [str(script.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    running = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) for command in commands
    ]
    for process, result in zip(running, results, strict=True):
        _, errors = process.communicate(timeout=300)
        assert result.exists(), errors
    return [torch.load(result) for result in results]
