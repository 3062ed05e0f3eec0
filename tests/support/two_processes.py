"""A script that several processes run at once: rank, a store, a result file and their number as arguments."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD = 2


def results_of(script: Path, folder: Path, world: int = WORLD) -> list[Any]:
    """What each of the processes wrote by torch.save."""
    store, results = folder / "store", [folder / f"rank{rank}.pt" for rank in range(world)]
    commands = [
        [sys.executable, str(script), str(rank), str(store), str(result), str(world)]
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


def write_result(compute: Callable[[int], object]) -> None:
    """What the script does: join the group, compute by rank, and write the result as a whole."""
    rank, store, result, world = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.save(compute(rank), f"{result}.part")
    os.replace(f"{result}.part", result)
    dist.destroy_process_group()
