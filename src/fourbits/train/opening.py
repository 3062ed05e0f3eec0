"""The state that a run starts from: its text, its settings, and the checkpoint of another run."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fourbits.data.config import open_data
from fourbits.data.stream.dataset import PreparedData
from fourbits.settings import dump_yaml, parse_yaml, to_dict
from fourbits.train.config import RunConfig, config_from_mapping
from fourbits.train.fork import Fork
from fourbits.train.imported import Imported, is_imported
from fourbits.train.listener import RunListener
from fourbits.train.preflight import check_settings
from fourbits.train.ranks.ranks import Ranks
from fourbits.train.run_folder import RunFolder, read_json
from fourbits.train.summary import Summary

# Keys of a validation record that a source of the same name would overwrite.
RESERVED_NAMES = ("loss", "tokens", "bits_per_byte")


@dataclass(frozen=True)
class Opened:
    """The state before a run: its text, its settings, and where it starts from."""

    data: PreparedData
    config: RunConfig
    fork: Fork | Imported | None
    message: str | None
    finished: Summary | None

    def shared(self) -> dict[str, Any]:
        """The part that other ranks take from this one, in plain values."""
        settings = dump_yaml(to_dict(self.config))
        return {"settings": settings, "forks": self.fork is not None, "finished": self.finished}

    @classmethod
    def of(
        cls,
        shared: dict[str, Any],
        cache: Path,
        listener: RunListener,
        start_from: Path | str | None,
    ) -> "Opened":
        """The same state on another rank, as rank 0 shared it; the text has been prepared by then."""
        fork = _source_of(Path(start_from)) if start_from is not None and shared["forks"] else None
        settings = config_from_mapping(
            parse_yaml(shared["settings"], "rank 0"), where="the settings of rank 0"
        )
        data = open_data(settings.data, cache, listener.preparing)
        return cls(data, settings, fork, None, shared["finished"])


def open_run(
    config: RunConfig,
    folder: RunFolder,
    cache: Path,
    listener: RunListener,
    start_from: Path | str | None,
    is_new: bool,
    ranks: Ranks,
) -> Opened:
    """Rank 0 prepares the text and reads the folder; others open the text once it exists.

    cache: folder of the prepared text; is_new: whether the run's folder was created for it. Raises ValueError
    if text, settings and folder do not fit.
    """
    own: list[Opened] = []

    def read() -> dict[str, Any]:
        own.append(_opened(config, folder, cache, listener, start_from, is_new, ranks))
        return {} if ranks.alone else own[0].shared()

    shared = ranks.agreed(read)
    folder.log.parent.mkdir(exist_ok=True)
    return own[0] if own else Opened.of(shared, cache, listener, start_from)


def _opened(
    config: RunConfig,
    folder: RunFolder,
    cache: Path,
    listener: RunListener,
    start_from: Path | str | None,
    is_new: bool,
    ranks: Ranks,
) -> Opened:
    """Prepare the text, and read the state of the folder. Raises ValueError if they do not fit."""
    try:
        fork = None if start_from is None else _fork(Path(start_from), folder)
        if isinstance(fork, Imported):
            config = fork.adopted(config)
        elif start_from is not None and fork is None:
            config = _with_imported_model(config, folder)
        check_settings(config, ranks)
        config = _with_kept_tokenizer(config, folder, listener)
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
    if ranks.restarts and folder.summary.is_file():
        summary = read_json(folder.summary)  # a restart after a failure does not cancel a request to end
        finished = finished or (summary if summary.get("ended") == "interrupted" else None)
    return Opened(data, config, fork, message, finished)


def _source_of(path: Path) -> Fork | Imported:
    """The checkpoint or model at a path of --from. Raises ValueError."""
    return Imported.of(path) if is_imported(path) else Fork.of(path)


def _with_imported_model(config: RunConfig, folder: RunFolder) -> RunConfig:
    """The settings with the model and tokenizer that the run in `folder` started from, if it did."""
    if "model" not in folder.ancestry()[-1]:
        return config
    stored = folder.stored_config()
    taken = {name: getattr(stored.data, name) for name in ("tokenizer", "end_token", "model_vocab_size")}
    return replace(config, model=stored.model, data=replace(config.data, **taken))


def _with_kept_tokenizer(config: RunConfig, folder: RunFolder, listener: RunListener) -> RunConfig:
    """The settings with the tokenizer that the run in `folder` kept, where the one they name is gone."""
    named = config.data.tokenizer
    is_gone = named is not None and Path(named).is_absolute() and not Path(named).exists()
    if not is_gone or not folder.tokenizer.is_file():
        return config
    listener.note(f"{named} is gone: reading {folder.tokenizer}")
    return replace(config, data=replace(config.data, tokenizer=str(folder.tokenizer.absolute())))


def _fork(path: Path, folder: RunFolder) -> Fork | Imported | None:
    """The checkpoint or model to start from; None if the run in `folder` started from it before.

    Raises ValueError if there is none, or if the folder holds another run.
    """
    ancestry = folder.ancestry()
    if ancestry and folder.newest_checkpoint() is not None and _is_ancestor(path, ancestry[-1]):
        return None
    fork = _source_of(path)
    if folder.has_steps() and (not ancestry or ancestry[-1]["checkpoint"] != fork.sha256):
        raise ValueError(f"{folder.path}: holds another run. Choose another --out.")
    return fork


def _is_ancestor(path: Path, entry: dict[str, Any]) -> bool:
    """Whether `path` names the run or checkpoint of an entry of "ancestry", which may no longer exist."""
    if "model" in entry:
        return path.absolute() == Path(entry["model"])
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
