"""`run`: settings in, a trained model in a folder out."""

import contextlib
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from fourbits.data.config import open_data
from fourbits.data.stream.dataset import PreparedData
from fourbits.device import probe
from fourbits.train.config import RunConfig
from fourbits.train.profile import StepProfile, require_kernels
from fourbits.train.report import Report
from fourbits.train.run_folder import RunFolder
from fourbits.train.session import Session
from fourbits.train.stop import StopRequest, stop_on_signals
from fourbits.train.summary import Summary

# Keys of a validation record that a source's own keys would hide.
TAKEN_NAMES = ("loss", "tokens", "bits_per_byte")


def run(
    config: RunConfig,
    out: Path | str,
    *,
    report: Report | None = None,
    stop: StopRequest | None = None,
    data_cache: Path | str | None = None,
    on_profile: Callable[[StepProfile], None] | None = None,
) -> Summary:
    """Train into the folder `out`, continuing what is there, and return its summary.json.

    stop: asked after every step; without one, SIGINT and SIGTERM stop the run. data_cache: where text is
    prepared, by default out/data. on_profile: is told where the time of two early steps went. A finished run
    is left as it is. Returns for runs that ended "finished" or "interrupted". Raises NonFiniteError if a loss
    or gradient stopped it, ValueError for settings, data or a checkpoint that do not fit, OSError for a full
    disk; summary.json then says so too.
    """
    report = report or Report()
    folder = RunFolder(Path(out))
    device = probe(None if config.train.device == "auto" else config.train.device)
    if on_profile is not None:
        require_kernels(device)  # before any text is prepared
    is_new = not folder.path.exists()
    with folder.locked(), num_threads(config.train.threads):
        cache = folder.path / "data" if data_cache is None else Path(data_cache)
        try:
            data = open_data(config.data, cache, report.preparing)
        except ValueError:  # no run begins on this text, so nothing of one stays
            if is_new:
                shutil.rmtree(folder.path)
            raise
        config = with_vocabulary(config, data)
        folder.check_settings(config)
        if finished := folder.finished_summary():
            report.note(f"{folder.path} is finished ({finished['steps']} steps); nothing to do")
            report.end(finished)
            return finished
        folder.summary.unlink(missing_ok=True)
        session = Session(folder, config, data, report, on_profile)
        with contextlib.nullcontext(stop) if stop else stop_on_signals(report.note) as request:
            return session.run(request)


def with_vocabulary(config: RunConfig, data: PreparedData) -> RunConfig:
    """The settings with the vocabulary of the data and, if documents are masked, the token that ends one.

    Raises ValueError for names that metrics need.
    """
    for name in TAKEN_NAMES:
        if name in data.validation:
            raise ValueError(
                f"data: a source cannot be called {name!r}; name it another way, as in my{name}=PATH."
            )
    end = data.tokenizer.end_id if config.data.mask_documents else config.model.document_end
    vocabulary = max(data.tokenizer.vocab_size, config.data.model_vocab_size)
    model = replace(config.model, vocab_size=vocabulary, document_end=end)
    return replace(config, model=model)


@contextmanager
def num_threads(count: int | None) -> Generator[None]:
    """Compute on so many CPU threads inside (None: as many as outside)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
