"""How many runs of a comparison execute in parallel, on which GPUs, and on how many CPU threads each."""

import os
from dataclasses import dataclass

import torch

from fourbits.compare.run.run_matrix import RunMatrix
from fourbits.device import probe
from fourbits.model.counts import count_parameters

# Serial Python bounds the steps of a smaller model: a second process speeds them up, a second thread does
# not. A larger model fills all threads by itself, and each parallel run needs its own memory.
SMALL_MODEL = 10_000_000
# Default limit: each process holds torch, a model and its compiled code, about 0.6 GB for the demo model.
MAX_DEFAULT_JOBS = 4


@dataclass(frozen=True, slots=True)
class Jobs:
    """How a comparison uses the machine. parallel: runs in parallel; threads: CPU threads per run.

    gpus: the GPUs to distribute over parallel runs, by their names in CUDA_VISIBLE_DEVICES; empty if there is
    no choice.
    """

    parallel: int
    threads: int
    gpus: tuple[str, ...] = ()


def choose_jobs(matrix: RunMatrix, requested: int | None = None) -> Jobs:
    """The value of --jobs, or for None the default that `fourbits compare --help` states.

    The result depends on the matrix and the machine, not on which runs are finished, so a comparison resumes
    with the thread count it began with. Raises ValueError below one run in parallel.
    """
    config = matrix.runs[0].config
    cores = torch.get_num_threads()
    if requested is not None and requested < 1:
        raise ValueError(
            f"--jobs must be at least 1, got {requested}. Omit it for a number that fits this machine."
        )
    kind = probe(None if config.train.device == "auto" else config.train.device).kind
    gpus = visible_gpus() if kind == "cuda" else ()
    parallel = requested or max(1, len(gpus))
    if requested is None and _is_small(matrix) and kind == "cpu":
        parallel = max(1, min(MAX_DEFAULT_JOBS, cores // (config.train.threads or 1)))
    parallel = min(parallel, len(matrix.runs))
    return Jobs(parallel, config.train.threads or max(1, cores // parallel), gpus)


def visible_gpus() -> tuple[str, ...]:
    """The NVIDIA GPUs that this process sees, as CUDA_VISIBLE_DEVICES of a child process names them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count)) if named is None else map(str.strip, named.split(","))
    return tuple(names)[:count]


def _is_small(matrix: RunMatrix) -> bool:
    return count_parameters(matrix.runs[0].config.model)["linear"] <= SMALL_MODEL
