"""The `data` section of a run: what to read, and how to blend it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fourbits.data.corpora.corpus_folder import corpus_sources, is_corpus
from fourbits.data.corpora.deduplicate import Rule
from fourbits.data.corpora.document import Progress, Source
from fourbits.data.corpora.read_files import TEXT_FIELD
from fourbits.data.corpora.sources import DEFAULT, ReadOptions, file_sources
from fourbits.data.corpora.stdlib import stdlib_sources
from fourbits.data.prepare.prepare import PrepareOptions, prepare, request_of
from fourbits.data.prepare.round_trip import MAX_LOST
from fourbits.data.stream.blend import Phase
from fourbits.data.stream.dataset import PreparedData
from fourbits.data.stream.manifest import is_prepared
from fourbits.data.whole_file import is_source_name

STDLIB = "stdlib"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The data of a run.

    paths: one prepared folder, or text: files, folders, NAME=PATH, corpus folders, or "stdlib".
    phases: the blend; by default that of a built-in corpus, else proportional to size.
    max_epochs: an error if the run reads a source more often.
    mask_documents: packed documents do not see each other (attention, convolution, state).
    model_vocab_size: the model's vocabulary if larger than the tokenizer's; the extra entries are unused.
    The other fields control how text is read and prepared, see ReadOptions and PrepareOptions; a prepared
    folder ignores them.
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
    allow_skipped: bool = False
    follow_links: bool = False
    max_lost: float = MAX_LOST

    def __post_init__(self) -> None:
        """Raises ValueError for an empty path or name, and a number outside its range."""
        for name, values in (("paths", self.paths), ("tokenizer", [self.tokenizer])):
            if "" in values:
                raise ValueError(f"{name} is empty, as from a variable that is not set. Name one.")
        if self.max_epochs is not None and not self.max_epochs > 0:
            raise ValueError(
                f"max_epochs must be above 0, got {self.max_epochs}. Set it to null for no limit."
            )
        self.prepare_options()  # raises for a share outside its range, though a prepared folder ignores it

    def prepare_options(self) -> PrepareOptions:
        """How the text becomes token files."""
        return PrepareOptions(
            tokenizer=self.tokenizer,
            end_token=self.end_token,
            vocab_size=self.vocab_size,
            validation_fraction=self.validation_fraction,
            seed=self.split_seed,
            deduplicate=self.deduplicate,
            max_lost=self.max_lost,
        )


def open_data(config: DataConfig, cache: Path | str, progress: Progress | None = None) -> PreparedData:
    """Open the prepared folder in `paths`, or prepare the text in `paths` in a folder below `cache`.

    The folder's name is a hash of the request, so runs with equal requests share one prepared folder.
    """
    if len(config.paths) == 1 and is_prepared(Path(config.paths[0])):
        return PreparedData.open(config.paths[0])
    reading = ReadOptions(
        text_field=config.text_field, allow_skipped=config.allow_skipped, follow_links=config.follow_links
    )
    sources = text_sources(config.paths, reading)
    options = config.prepare_options()
    request = json.dumps(request_of(sources, options), sort_keys=True)
    return prepare(
        sources, Path(cache) / hashlib.sha256(request.encode()).hexdigest()[:16], options, progress
    )


def text_sources(paths: Sequence[str], options: ReadOptions = DEFAULT) -> list[Source]:
    """The sources of all paths, in order; a corpus folder has several, "stdlib" has code and prose."""
    sources: list[Source] = []
    for path in paths:
        if path == STDLIB:
            sources += stdlib_sources()
        elif path and is_prepared(Path(path)):
            raise ValueError(
                f"{path}: holds prepared data, which is read alone and as it is. To blend it with other "
                f"text, pass its .idx files."
            )
        else:
            sources += corpus_sources(path) if is_corpus(path) else file_sources([path], options)
    names = [source.name for source in sources]
    for name in names:
        if not is_source_name(name):
            raise ValueError(f"{name!r} cannot be the name of a source; choose another, as in other=PATH.")
        if names.count(name) > 1:
            raise ValueError(f"two sources are called {name!r}; rename one, as in other=PATH.")
    if not sources:
        raise ValueError("at least one path is needed: a file, a folder, or stdlib.")
    return sources
