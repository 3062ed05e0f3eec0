"""Join the other ranks, and leave them; if several fail, one of them reports its error."""

import importlib
import platform
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from fourbits.device import probe
from fourbits.train.corruption import CorruptionError
from fourbits.train.non_finite import NonFiniteError
from fourbits.train.parallel import ParallelConfig
from fourbits.train.ranks.failure import (
    FAILED,
    LostRankError,
    MissingRankError,
    OtherRankError,
    RankFailedError,
    ended,
    is_broken_connection,
    line_of,
    may_be_connection,
    why,
)
from fourbits.train.ranks.launcher import LaunchedRank, launched_rank
from fourbits.train.ranks.ranks import Ranks
from fourbits.train.ranks.rendezvous import connected, rendezvous
from fourbits.train.ranks.watchdog import Watchdog
from fourbits.train.rollback import RollbackError

#: seconds for which ranks let rank 0 report an error that all of them raise, and between two polls
_RANK_0_FIRST, _PAUSE = 30.0, 0.05
#: seconds within which ranks fail at the same time
_TOGETHER = 0.5


#: errors that all ranks raise
_ALIKE = (ValueError, NonFiniteError, RollbackError, CorruptionError)


@contextmanager
def joined(config: ParallelConfig, device: str | None) -> Generator[Ranks]:
    """The ranks that a launcher started, or this process alone. device: as for `probe`, None for the best.

    With several ranks, an error inside becomes RankFailedError. The first rank to fail reports its error;
    those that fail after it, usually because it is gone, stay silent.
    """
    where = launched_rank()
    if where is None:
        yield Ranks(torch.device(probe(device).torch_device))
        return
    own = _own_device(device, where)
    store = _store(where, config.timeout)
    watch = Watchdog(store.clone(), where.rank, where.world, config.timeout)
    watch.start()
    try:
        ranks = importlib.import_module("fourbits.train.ranks.group")
        group: Ranks = ranks.RankGroup(where, config, store, own, watch)
        yield group
        group.leave()
    except Exception as error:  # noqa: BLE001 - whatever it is, others must not wait for this rank
        if threading.current_thread() is threading.main_thread():
            # the launcher sends it to ranks that seem to hang
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        reports = _may_report(store, where.rank, error)
        cause = watch.explained(error) if reports else error
        others = _others(store, watch) if reports and not isinstance(cause, LostRankError) else ()
        raise RankFailedError(where.rank, reports, cause, others) from cause
    except KeyboardInterrupt:
        _may_report(store, where.rank, None)
        raise
    finally:
        watch.end()


def _may_report(store: Any, rank: int, error: BaseException | None) -> bool:
    """Whether this rank is the first to fail, and so reports its error."""
    try:
        store.set(why(rank), _by_itself(error))
        store.set(ended(rank), _own_error(store, error))
        if isinstance(error, OtherRankError):
            return False
        if rank and isinstance(error, _ALIKE):
            _wait_for_first(store)
        return store.add(FAILED, 1) == 1
    except RuntimeError:  # the process that holds the store is gone
        return True


def _own_error(store: Any, error: BaseException | None) -> str:
    """The error in one line; empty for one that all ranks raise, or that another rank may have caused."""
    if error is None or isinstance(error, (OtherRankError, LostRankError, *_ALIKE)):
        return ""
    if may_be_connection(error) and store.check([FAILED]):
        return ""
    return line_of(error)


def _by_itself(error: BaseException | None) -> str:
    """The error in one line; empty for one that another rank caused."""
    caused = error is None or isinstance(error, OtherRankError | LostRankError) or is_broken_connection(error)
    return "" if error is None or caused else line_of(error)


def _others(store: Any, watch: Watchdog) -> tuple[str, ...]:
    """A line for each other rank that failed with a different error, until now or shortly after.

    Ranks that fail alike, as those that write to a full disk, have one line, that of the first.
    """
    time.sleep(_TOGETHER)
    try:
        own = store.get(ended(watch.rank)).decode()
        others = [rank for rank in range(watch.world) if rank != watch.rank and store.check([ended(rank)])]
        texts = {rank: store.get(ended(rank)).decode() for rank in others}
        return tuple(
            f"rank {rank} on {watch.node_of(rank)} failed, too: {text}"
            for rank, text in texts.items()
            if text not in ("", own)
        )
    except RuntimeError:  # the process that holds the store is gone
        return ()


def _wait_for_first(store: Any) -> None:
    """Let rank 0 report the error, after it has written how the run ended."""
    deadline = time.monotonic() + _RANK_0_FIRST
    while time.monotonic() < deadline and not store.check([FAILED]):
        time.sleep(_PAUSE)


def _store(where: LaunchedRank, timeout: float) -> Any:
    """The launcher's store, limited to keys of this start, once all ranks have reached it.

    Raises RankFailedError if one does not start; the first rank to notice reports it.
    """
    store = None
    try:
        store = connected(where, timeout)
        name = rendezvous(store, where.rank, where.world, timeout)
    except MissingRankError as error:
        reports = store is None or store.add(f"late/{where.restarts}", 1) == 1
        raise RankFailedError(where.rank, reports, error) from error
    store = importlib.import_module("torch.distributed").PrefixStore(name, store)
    store.set(f"here/{where.rank}", platform.node())
    return store


def _own_device(requested: str | None, where: LaunchedRank) -> torch.device:
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
            f"train.device: rank {where.rank} has local rank {where.local_rank} on a node with "
            f"{torch.cuda.device_count()} GPUs. Start at most as many processes per node as it has GPUs."
        )
    torch.cuda.set_device(where.local_rank)
    return torch.device("cuda", where.local_rank)
