"""Joining the other ranks, and leaving them: of several that fail, one says why."""

import importlib
import os
import platform
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from fourbits.device import probe
from fourbits.train.non_finite import NonFiniteError
from fourbits.train.parallel import ParallelConfig
from fourbits.train.ranks.alone import Ranks
from fourbits.train.ranks.failure import FAILED, OtherRankError, RankFailedError
from fourbits.train.ranks.launcher import Place, place

#: seconds that other ranks leave to rank 0 to report what all of them find
_RANK_0_FIRST = 1.0


@contextmanager
def joined(config: ParallelConfig, device: str | None) -> Generator[Ranks]:
    """The ranks that a launcher started, or this process alone. device: as for `probe`, None for the best.

    An error inside becomes RankFailedError on several ranks: the first to fail speaks, and all others that
    fail after it, mostly because it is gone, stay silent.
    """
    where = place()
    if where is None:
        yield Ranks(torch.device(probe(device).torch_device))
        return
    own = _own_device(device, where)
    store = _store(where, config.timeout)
    try:
        ranks = importlib.import_module("fourbits.train.ranks.group")
        group: Ranks = ranks.RankGroup(where, config, store, own)
        yield group
        group.leave()
    except Exception as error:
        raise RankFailedError(where.rank, _may_speak(store, where.rank, error), error) from error
    except KeyboardInterrupt:
        _may_speak(store, where.rank, None)
        raise


def _may_speak(store: Any, rank: int, error: BaseException | None) -> bool:
    """Whether this rank is the first to fail."""
    if isinstance(error, OtherRankError):
        return False
    if rank and isinstance(error, ValueError | NonFiniteError):  # found by every rank alike
        time.sleep(_RANK_0_FIRST)
    try:
        return store.add(FAILED, 1) == 1
    except RuntimeError:  # the process that holds the store is gone
        return True


def _store(where: Place, timeout: float) -> Any:
    """The launcher's store, when all ranks have reached it. Raises OSError naming those that did not."""
    os.environ.setdefault("TORCHELASTIC_USE_AGENT_STORE", "False")
    dist = importlib.import_module("torch.distributed")
    store, *_ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout))))
    store.set(f"here/{where.rank}", platform.node())
    deadline = time.monotonic() + timeout
    missing = list(range(where.world))
    while missing:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise TimeoutError(
                f"rank {', '.join(map(str, missing))} of {where.world} did not start within {timeout:g} s "
                "(parallel.timeout). Look for its error on its node."
            )
        time.sleep(0.01 if missing else 0)
    return store


def _own_device(requested: str | None, where: Place) -> torch.device:
    """The device of this rank: one GPU each, or the CPU. Raises ValueError if there are too few."""
    kind = probe(requested).torch_device
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise ValueError(
            f"train.device: several ranks run on CUDA or ROCm GPUs or on CPUs, not on {kind}. "
            "Set train.device to cpu, or start one process without torchrun."
        )
    if where.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"train.device: rank {where.rank} is number {where.local_rank} on its node, which has "
            f"{torch.cuda.device_count()} GPUs. Start at most as many processes per node as it has GPUs."
        )
    torch.cuda.set_device(where.local_rank)
    return torch.device("cuda", where.local_rank)
