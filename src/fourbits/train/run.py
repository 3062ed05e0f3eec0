"""`run`: settings in, a trained model in a folder out."""

import contextlib
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fourbits.data.config import open_data
from fourbits.data.stream.dataset import PreparedData
from fourbits.device import choose_backend, probe
from fourbits.settings import dump_yaml, parse_yaml, to_dict
from fourbits.train.config import RunConfig, config_from_mapping
from fourbits.train.fork import Fork
from fourbits.train.listener import RunListener
from fourbits.train.log_file import LogFile
from fourbits.train.profile import StepProfile, require_kernels
from fourbits.train.ranks.alone import Ranks
from fourbits.train.ranks.follower import FollowerFolder
from fourbits.train.ranks.join import joined
from fourbits.train.run_folder import RunFolder
from fourbits.train.session import Session
from fourbits.train.sinks import Listeners, SinkListener
from fourbits.train.stop import StopRequest, stop_on_signals
from fourbits.train.summary import Summary

# Keys of a validation record that a source of the same name would overwrite.
RESERVED_NAMES = ("loss", "tokens", "bits_per_byte")


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
) -> Summary:
    """Train in the folder `out`, continuing a run that is there, and return the content of its summary.json.

    listener: receives the events of the run. stop: checked after every step; without it, SIGINT, SIGTERM
    and SIGHUP stop the run, and SIGUSR1 saves. data_cache: folder of the prepared data, by default out/data.
    on_profile: receives a profile of two early steps. start_from: RUN or RUN/checkpoints/step_N, from which a
    new run in `out` starts; one that is there continues. ranks: from `joined`, by default what torchrun
    started, or this process alone; rank 0 writes, and only its listener is called. A finished run is not
    changed. Returns if it
    "finished" or was "interrupted". Raises NonFiniteError if a non-finite loss or gradient stopped it,
    ValueError for settings, data or a checkpoint that do not fit, OSError for a full disk, and
    FolderChangedError if the folder was moved or removed; summary.json then records the reason.
    """
    if ranks is None:
        with joined(config.parallel, None if config.train.device == "auto" else config.train.device) as ranks:
            return run(
                config,
                out,
                listener=listener,
                stop=stop,
                data_cache=data_cache,
                on_profile=on_profile,
                start_from=start_from,
                ranks=ranks,
            )
    started = time.monotonic()
    shown = listener if listener and ranks.is_first else RunListener()
    folder = RunFolder(Path(out)) if ranks.is_first else FollowerFolder(Path(out), ranks.rank)
    log = LogFile(folder.log, config.train.log_interval, shown.note)
    sinks = SinkListener(config, folder.path, Listeners((shown, log)).note)
    listener = Listeners((shown, log, sinks) if ranks.is_first else (shown, log))
    device = probe(None if config.train.device == "auto" else config.train.device)
    choose_backend(config.train.backend, device)  # refuses what this device cannot run
    if on_profile is not None:
        require_kernels(device)  # before any text is prepared
    is_new = not folder.path.exists()
    with folder.locked(), log.session(), num_threads(config.train.threads):
        cache = folder.path / "data" if data_cache is None else Path(data_cache)
        found: list[_Found] = []

        def find() -> dict[str, Any]:
            found.append(_found(config, folder, cache, listener, start_from, is_new))
            return found[0].shared()

        shared = ranks.agreed(find)
        folder.log.parent.mkdir(exist_ok=True)
        here = found[0] if found else _Found.of(shared, config, cache, listener, start_from)
        if here.message:
            listener.note(here.message)
        if here.finished:
            shown.note(f"{folder.path} is finished ({here.finished['steps']} steps); nothing to do")
            shown.end(here.finished)
            return here.finished
        if ranks.is_first:
            folder.summary.unlink(missing_ok=True)
        session = Session(folder, here.config, here.data, listener, on_profile, here.fork, started, ranks)
        with contextlib.nullcontext(stop) if stop else stop_on_signals(listener.note) as request:
            return session.run(request)


@dataclass(frozen=True)
class _Found:
    """What there is before a run: its text, its settings, and where it starts from."""

    data: PreparedData
    config: RunConfig
    fork: Fork | None
    message: str | None
    finished: Summary | None

    def shared(self) -> dict[str, Any]:
        """What other ranks take from this one, in plain values."""
        settings = dump_yaml(to_dict(self.config))
        return {"settings": settings, "forks": self.fork is not None, "finished": self.finished}

    @classmethod
    def of(
        cls,
        shared: dict[str, Any],
        config: RunConfig,
        cache: Path,
        listener: RunListener,
        start_from: Path | str | None,
    ) -> "_Found":
        """The same on another rank, by what the first one found: the text is prepared by then."""
        fork = Fork.of(Path(start_from)) if start_from is not None and shared["forks"] else None
        data = open_data(config.data, cache, listener.preparing)
        settings = config_from_mapping(
            parse_yaml(shared["settings"], "rank 0"), where="the settings of rank 0"
        )
        return cls(data, settings, fork, None, shared["finished"])


def _found(
    config: RunConfig,
    folder: RunFolder,
    cache: Path,
    listener: RunListener,
    start_from: Path | str | None,
    is_new: bool,
) -> _Found:
    """Prepare the text, and look at what the folder holds. Raises ValueError if they do not fit."""
    try:
        fork = None if start_from is None else _fork(Path(start_from), folder)
        data = open_data(config.data, cache, listener.preparing)
        config = with_vocabulary(config, data)
        if fork:
            fork.check(config, data)
    except ValueError as error:
        if is_new:  # no run can use this text
            shutil.rmtree(folder.path)
        elif start_from is None and folder.has_steps():
            raise ValueError(f"{error} If the run's text has moved, pass --data.paths.") from error
        raise
    message = None
    if fork is None:
        config, message = folder.continued(config)
    finished = None if fork else folder.finished_summary(config.train.num_steps)
    return _Found(data, config, fork, message, finished)


def _fork(path: Path, folder: RunFolder) -> Fork | None:
    """The checkpoint to start from; None if the run in `folder` started from it before.

    Raises ValueError if there is none, or if the folder holds another run.
    """
    ancestry = folder.ancestry()
    if ancestry and folder.newest_checkpoint() is not None and _is_ancestor(path, ancestry[-1]):
        return None
    fork = Fork.of(path)
    if folder.has_steps() and (not ancestry or ancestry[-1]["checkpoint"] != fork.sha256):
        raise ValueError(f"{folder.path}: holds another run. Choose another --out.")
    return fork


def _is_ancestor(path: Path, entry: dict[str, Any]) -> bool:
    """Whether `path` names the run or the checkpoint of an entry of "ancestry", which may be gone by now."""
    run = Path(entry["run"])
    return path.absolute() in (run, run / "checkpoints" / f"step_{entry['step']}")


def with_vocabulary(config: RunConfig, data: PreparedData) -> RunConfig:
    """The settings with the data's vocabulary size and, if documents are masked, its end token.

    Raises ValueError for sources with reserved names.
    """
    for name in RESERVED_NAMES:
        if name in data.validation:
            raise ValueError(
                f"data: a source must not have the reserved name {name!r}. Rename it, as in my{name}=PATH."
            )
    end = data.tokenizer.end_id if config.data.mask_documents else config.model.document_end
    vocabulary = max(data.tokenizer.vocab_size, config.data.model_vocab_size)
    model = replace(config.model, vocab_size=vocabulary, document_end=end)
    return replace(config, model=model)


@contextmanager
def num_threads(count: int | None) -> Generator[None]:
    """Use `count` CPU threads inside (None: no change)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
