"""The `data` section of a run: what to read, and how it is blended."""

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

    paths: one prepared folder, or text: files, folders, NAME=PATH, corpus folders, or "stdlib". phases: the
    blend; none means the demo's for code and prose, else proportional to size. max_epochs: refuse to read a
    source more often. mask_documents: packed documents do not see each other (attention, convolution, state).
    model_vocab_size: the model's vocabulary where the tokenizer's is smaller; further ids stand for no token.
    The other fields say how text is prepared, see PrepareOptions; a prepared folder has decided them already.
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
        """Raises ValueError for a max_epochs that is no positive number."""
        if self.max_epochs is not None and not self.max_epochs > 0:
            raise ValueError(f"data: max_epochs must be above 0, got {self.max_epochs}.")


def open_data(config: DataConfig, cache: Path | str, progress: Progress | None = None) -> PreparedData:
    """Open the prepared folder that `paths` names, or prepare the text it names in a folder below `cache`.

    That folder is named by what is asked, so runs that ask the same share it, and nothing is prepared twice.
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
    """Sources of text paths, in order; a corpus folder has several, "stdlib" has code and prose."""
    sources: list[Source] = []
    for path in paths:
        if path == STDLIB:
            sources += stdlib_sources()
        else:
            sources += corpus_sources(path) if is_corpus(path) else file_sources([path], text_field)
    names = [source.name for source in sources]
    for name in names:
        if not name.isprintable() or not name.strip("."):
            raise ValueError(f"data: {name!r} cannot be the name of a source; name it, as in other=PATH.")
        if names.count(name) > 1:
            raise ValueError(f"data: two sources are called {name!r}; name one of them, as in other=PATH.")
    if not sources:
        raise ValueError("data: no text was named; give files, folders or stdlib.")
    return sources
