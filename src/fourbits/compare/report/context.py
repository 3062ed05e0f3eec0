"""Everything in a comparison's report besides the runs: the training text, sample output, and commands."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourbits.compare.techniques.findings import Techniques
from fourbits.data.stream.dataset import PreparedData
from fourbits.generate.generate import generate
from fourbits.generate.sampling import Sampling
from fourbits.train.load_run import load_trained

PROMPT_TOKENS, GENERATED_TOKENS = 32, 96
# Low enough for real words, high enough to avoid the loops that a small model falls into at 0.
TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source of text. tokens: training and validation; unigram_entropy: training text, nats per token."""

    name: str
    documents: int
    text_bytes: int
    tokens: int
    license: str
    unigram_entropy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """All sources of text, and the tokenizer. unigram_entropy: over all sources, nats per token."""

    sources: tuple[Source, ...]
    unigram_entropy: float
    vocabulary: int
    tokenizer_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Text that a trained model generated from a prompt."""

    recipe: str
    seed: int
    temperature: float
    source: str
    prompt: str
    continuation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """commands: command lines that reproduce the comparison. techniques: measured on its BF16 model."""

    commands: tuple[str, ...]
    corpus: Corpus | None = None
    sample: Sample | None = None
    techniques: Techniques | None = None


def describe_corpus(data: PreparedData, entropy: Mapping[str, float]) -> Corpus:
    """Describe a prepared folder. entropy: by source and of the whole "corpus", from a run's manifest."""
    sources = [_source(name, record, entropy[name]) for name, record in data.manifest["sources"].items()]
    return Corpus(
        sources=tuple(sources),
        unigram_entropy=entropy["corpus"],
        vocabulary=data.tokenizer.vocab_size,
        tokenizer_sha256=data.tokenizer.sha256,
    )


def generate_sample(run: Path, data: PreparedData) -> Sample:
    """Let the model of a run continue the first validation document of the first source. Deterministic."""
    trained = load_trained(run)
    tokenizer = trained.tokenizer
    source, file = next(iter(data.validation.items()))
    longest = trained.config.model.max_seq_len
    prompt = file.document(0)[: min(PROMPT_TOKENS, longest - 1)].tolist()
    (tokens,) = generate(
        trained.model,
        [prompt],
        min(GENERATED_TOKENS, longest - len(prompt)),
        sampling=Sampling(temperature=TEMPERATURE),
        end=tokenizer.end_id,
        num_ids=tokenizer.size,
    )
    return Sample(
        recipe=trained.config.recipe.name,
        seed=trained.config.train.seed,
        temperature=TEMPERATURE,
        source=source,
        prompt=tokenizer.decode(prompt),
        continuation=tokenizer.decode(tokens),
    )


def _source(name: str, record: Mapping[str, Any], entropy: float) -> Source:
    return Source(
        name=name,
        documents=record["documents"],
        text_bytes=record["text_bytes"],
        tokens=record["train"]["tokens"] + record["validation"]["tokens"],
        license=record["licence"],
        unigram_entropy=entropy,
    )
