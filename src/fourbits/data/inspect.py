"""Looking into prepared data: lengths, repetitions, and what a run reads from where at which step."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fourbits.data.corpora.deduplicate import HashSet
from fourbits.data.stream.dataset import PreparedData
from fourbits.data.stream.stream import PhasedStream
from fourbits.data.stream.token_file import TokenFile

QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)


def length_quantiles(file: TokenFile) -> dict[str, int]:
    """Ids in the shortest, the middle, ..., the longest document, by quantile; end tokens included."""
    lengths = np.sort(file.lengths)
    places = [round(quantile * (len(lengths) - 1)) for quantile in QUANTILES]
    return {f"{quantile:g}": int(lengths[place]) for quantile, place in zip(QUANTILES, places, strict=True)}


@dataclass(frozen=True, slots=True)
class Repeated:
    """Documents of a source whose ids were met before, and how many ids they have."""

    documents: int
    tokens: int


def repeated_documents(data: PreparedData) -> dict[str, dict[str, Repeated]]:
    """Per split and source, documents equal to an earlier one.

    "train": of a training file, this source's or one's before it; "validation": of any training file, so text
    that the model is trained on and judged by.
    """
    met = HashSet()
    train = {name: _count(file, lambda value: not met.add(value)) for name, file in data.train.items()}
    held_out = {name: _count(file, met.__contains__) for name, file in data.validation.items()}
    return {"train": train, "validation": held_out}


def _count(file: TokenFile, is_met: Callable[[int], bool]) -> Repeated:
    documents, tokens = 0, 0
    for number in range(file.num_documents):
        ids = file.document(number)
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
        if is_met(int.from_bytes(digest, "little")):
            documents, tokens = documents + 1, tokens + len(ids)
    return Repeated(documents, tokens)


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """What one phase reads of one source. epochs: how often the source was read at the phase's end."""

    share: float
    samples: int
    tokens: int
    epochs: float


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """One phase of a run: its steps [first, end), samples, and every source's part.

    A phase ends between two samples, so a step may belong to two. error: how far a share is from the weight
    that was asked, at most.
    """

    first_step: int
    end_step: int
    first_sample: int
    end_sample: int
    period: int
    error: float
    sources: dict[str, SourcePlan]


def phase_plan(stream: PhasedStream, samples_per_step: int) -> list[PhasePlan]:
    """Every phase of a run, in order."""
    plans: list[PhasePlan] = []
    sizes = {name: windows.size for name, windows in zip(stream.names, stream.windows, strict=True)}
    for phase in stream.blend.phases:
        before, after = stream.blend.cursors(phase.first), stream.blend.cursors(phase.end)
        sources = {
            name: SourcePlan(
                share=phase.weights.slots[name] / phase.weights.period,
                samples=after[name] - before[name],
                tokens=(after[name] - before[name]) * stream.seq_len,
                epochs=after[name] / sizes[name],
            )
            for name in stream.names
        }
        steps = phase.first // samples_per_step, -(-phase.end // samples_per_step)
        weights = phase.weights
        plans.append(PhasePlan(*steps, phase.first, phase.end, weights.period, weights.error, sources))
    return plans


def places(stream: PhasedStream, first: int, count: int) -> list[dict[str, Any]]:
    """Where samples first .. first + count - 1 are read: source, epoch, ids [begin, end), documents met."""
    numbers = np.arange(first, first + count, dtype=np.int64)
    source, start = stream.locate(numbers)
    _, cursor = stream.blend.locate(numbers)
    rows: list[dict[str, Any]] = []
    for number, one, begin, turn in zip(numbers.tolist(), source, start.tolist(), cursor, strict=True):
        windows = stream.windows[one]
        end = begin + stream.seq_len + 1
        documents = windows.file.document_at(begin), windows.file.document_at(end - 1)
        row = {"sample": number, "source": stream.names[one], "epoch": int(turn // windows.size)}
        rows.append({**row, "begin": begin, "end": end, "documents": documents})
    return rows
