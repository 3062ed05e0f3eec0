"""The `data` section of a run: what to read, and how to blend it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fourbits.data.corpora.corpus_folder import corpus_sources, is_corpus
from fourbits.data.corpora.deduplicate import Rule
from fourbits.data.corpora.document import Progress, Source
from fourbits.data.corpora.sources import file_sources
from fourbits.data.corpora.stdlib import stdlib_sources
from fourbits.data.corpora.text_files import TEXT_FIELD
from fourbits.data.prepare.prepare import PrepareOptions, prepare, request_of
from fourbits.data.stream.blend import Phase
from fourbits.data.stream.dataset import PreparedData
from fourbits.data.stream.manifest import MANIFEST

STDLIB = "stdlib"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What a run reads.

    paths: one prepared folder, or text: files, folders, NAME=PATH, corpus folders, or "stdlib".
    phases: the blend; by default that of a built-in corpus, else proportional to size.
    max_epochs: an error if the run reads a source more often.
    mask_documents: packed documents do not see each other (attention, convolution, state).
    model_vocab_size: the model's vocabulary if larger than the tokenizer's; the extra entries are unused.
    The other fields control how text is prepared, see PrepareOptions; a prepared folder ignores them.
    """

    paths: tuple[str, ...] = (STDLIB,)
    phases: tuple[Phase, ...] = ()
    max_epochs: float | None = None
    mask_documents: bool = False
    model_vocab_size: int = 0
    tokenizer: str | None = None
    end_token: str | None = None
    vocab_size: int = 2048
    validation_fraction: float = 0.05
    split_seed: int = 0
    deduplicate: Rule = "none"
    text_field: str = TEXT_FIELD

    def __post_init__(self) -> None:
        """Raises ValueError unless max_epochs is positive."""
        if self.max_epochs is not None and not self.max_epochs > 0:
            raise ValueError(f"data.max_epochs must be above 0, got {self.max_epochs}.")


def open_data(config: DataConfig, cache: Path | str, progress: Progress | None = None) -> PreparedData:
    """Open the prepared folder in `paths`, or prepare the text in `paths` in a folder below `cache`.

    The folder's name is a hash of the request, so runs with equal requests share one prepared folder.
    """
    if len(config.paths) == 1 and (Path(config.paths[0]) / MANIFEST).is_file():
        return PreparedData.open(config.paths[0])
    sources = text_sources(config.paths, config.text_field)
    options = PrepareOptions(
        tokenizer=config.tokenizer,
        end_token=config.end_token,
        vocab_size=config.vocab_size,
        validation_fraction=config.validation_fraction,
        seed=config.split_seed,
        deduplicate=config.deduplicate,
    )
    request = json.dumps(request_of(sources, options), sort_keys=True)
    return prepare(
        sources, Path(cache) / hashlib.sha256(request.encode()).hexdigest()[:16], options, progress
    )


def text_sources(paths: Sequence[str], text_field: str = TEXT_FIELD) -> list[Source]:
    """The sources of all paths, in order; a corpus folder has several, "stdlib" has code and prose."""
    sources: list[Source] = []
    for path in paths:
        if path == STDLIB:
            sources += stdlib_sources()
        else:
            sources += corpus_sources(path) if is_corpus(path) else file_sources([path], text_field)
    names = [source.name for source in sources]
    for name in names:
        if not name.isprintable() or not name.strip("."):
            raise ValueError(f"{name!r} cannot be the name of a source; choose another, as in other=PATH.")
        if names.count(name) > 1:
            raise ValueError(f"two sources are called {name!r}; rename one, as in other=PATH.")
    if not sources:
        raise ValueError("at least one path is needed: a file, a folder, or stdlib.")
    return sources
