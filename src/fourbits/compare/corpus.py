"""Where the text came from, and the loss of a model that knows only how frequent each token is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fourbits.data.stream.dataset import PreparedData


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """One source. tokens: training and validation; unigram_entropy: of the training text, nats per token."""

    name: str
    documents: int
    text_bytes: int
    tokens: int
    licence: str
    unigram_entropy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFacts:
    """All sources. python: version whose standard library was read, where it was."""

    sources: tuple[SourceFacts, ...]
    unigram_entropy: float
    vocabulary: int
    tokenizer_sha256: str
    python: str


def describe_corpus(data: PreparedData, entropy: Mapping[str, float]) -> CorpusFacts:
    """Facts of a prepared folder. entropy: by source and of the whole "corpus", from a run's manifest."""
    sources = [_source(name, record, entropy[name]) for name, record in data.manifest["sources"].items()]
    return CorpusFacts(
        sources=tuple(sources),
        unigram_entropy=entropy["corpus"],
        vocabulary=data.tokenizer.vocab_size,
        tokenizer_sha256=data.tokenizer.sha256,
        python=data.manifest["python"],
    )


def _source(name: str, record: Mapping[str, Any], entropy: float) -> SourceFacts:
    return SourceFacts(
        name=name,
        documents=record["documents"],
        text_bytes=record["text_bytes"],
        tokens=record["train"]["tokens"] + record["validation"]["tokens"],
        licence=record["licence"],
        unigram_entropy=entropy,
    )
