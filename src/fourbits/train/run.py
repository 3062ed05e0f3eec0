"""`run`: settings in, a trained model in a folder out."""

import contextlib
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from fourbits.device import choose_backend, probe
from fourbits.train.config import RunConfig
from fourbits.train.determinism import deterministic
from fourbits.train.listener import RunListener
from fourbits.train.log_file import LogFile
from fourbits.train.opening import open_run
from fourbits.train.precision import check_schedule
from fourbits.train.profile import StepProfile
from fourbits.train.ranks.follower import FollowerFolder
from fourbits.train.ranks.join import joined
from fourbits.train.ranks.ranks import Ranks
from fourbits.train.recompute_check import require_repeatable
from fourbits.train.run_folder import RunFolder
from fourbits.train.session import Session
from fourbits.train.sinks import Listeners, SinkListener
from fourbits.train.stop import StopRequest, stop_on_signals
from fourbits.train.summary import Summary


def run(
    config: RunConfig,
    out: Path | str,
    *,
    listener: RunListener | None = None,
    stop: StopRequest | None = None,
    data_cache: Path | str | None = None,
    on_profile: Callable[[StepProfile], None] | None = None,
    start_from: Path | str | None = None,
    ranks: Ranks | None = None,
    on_checkpoint: Callable[[Path], None] | None = None,
) -> Summary:
    """Train in the folder `out`, continuing a run that is there, and return the content of its summary.json.

    listener: receives the events of the run. stop: checked after every step; without it, SIGINT, SIGTERM
    and SIGHUP stop the run, SIGUSR1 saves, and SIGUSR2 records a step in out/profiles. data_cache: folder of
    the prepared data, by default out/data. on_profile: an early step is recorded, too, and this receives its
    profile if it ran on CUDA. start_from: RUN, RUN/checkpoints/step_N or a transformers folder, from which a
    new run in `out` starts; one that is there continues. ranks: from `joined`, by default those of torchrun,
    or this process alone; rank 0 writes, and only its listener is called. on_checkpoint: called on all ranks
    with each checkpoint that train.evaluate asks for, see `fourbits.evaluation.at_checkpoints`. A finished
    run is not changed. Returns if it "finished" or was "interrupted". Raises NonFiniteError if a non-finite
    loss or gradient stopped it, ValueError for settings, data or a checkpoint that do not fit, OSError for a
    full disk, CorruptionError if a check for silent corruption failed, and FolderChangedError if the folder
    was moved or removed; summary.json then records the reason.
    Under torchrun, RankFailedError caused by any of these.
    """
    if config.train.evaluate and on_checkpoint is None:
        raise ValueError(
            "train.evaluate: is for fourbits train, and this run has nothing to evaluate with. Remove the "
            "setting, or from Python pass on_checkpoint=checkpoint_evaluation(config.train, ranks), too."
        )
    started, requested = time.monotonic(), None if config.train.device == "auto" else config.train.device
    with contextlib.nullcontext(ranks) if ranks else joined(config.parallel, requested) as ranks:
        shown = listener if listener and ranks.is_first else RunListener()
        folder = RunFolder(Path(out)) if ranks.is_first else FollowerFolder(Path(out), ranks.rank)
        log = LogFile(folder.log, config.train.log_interval, shown.note)
        sinks = SinkListener(config, folder.path, Listeners((shown, log)).note)
        listener = Listeners((shown, log, sinks) if ranks.is_first else (shown, log))
        device = probe(requested)
        choose_backend(config.train.backend, device)  # refuses what this device cannot run
        check_schedule(config)
        require_repeatable(config.train, device)
        is_new = not folder.path.exists()
        exact = deterministic(config.train.deterministic, device.torch_device)
        with folder.locked(), log.session(), num_threads(config.train.threads), exact:
            cache = folder.path / "data" if data_cache is None else Path(data_cache)
            found = open_run(config, folder, cache, listener, start_from, is_new, ranks)
            if found.message:
                listener.note(found.message)
            if found.finished:
                ended, steps = found.finished["ended"], found.finished["steps"]
                shown.note(f"{folder.path} is {ended} ({steps} steps); nothing to do")
                shown.end(found.finished)
                return found.finished
            if ranks.is_first:
                folder.summary.unlink(missing_ok=True)
            session = Session(
                *(folder, found.config, found.data, listener),
                *(on_profile, found.fork, started, ranks, on_checkpoint),
            )
            with contextlib.nullcontext(stop) if stop else stop_on_signals(listener.note) as request:
                return session.run(request)


@contextmanager
def num_threads(count: int | None) -> Generator[None]:
    """Use `count` CPU threads inside (None: no change)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
