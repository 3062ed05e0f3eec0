"""Inspects prepared data: document lengths, duplicates, and which samples a run reads at each step."""

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
    """Quantiles of document length in tokens, end tokens included."""
    lengths = np.sort(file.lengths)
    indices = [round(quantile * (len(lengths) - 1)) for quantile in QUANTILES]
    return {f"{quantile:g}": int(lengths[index]) for quantile, index in zip(QUANTILES, indices, strict=True)}


@dataclass(frozen=True, slots=True)
class Duplicates:
    """The number of duplicate documents of a source, and their tokens."""

    documents: int
    tokens: int


def duplicate_documents(data: PreparedData) -> dict[str, dict[str, Duplicates]]:
    """Count duplicates by split and source.

    "train": documents equal to an earlier training document, of this source or one before it; "validation":
    documents that are also in a training file, so the model is evaluated on text it was trained on.
    """
    seen = HashSet()
    train = {name: _count(file, lambda value: not seen.add(value)) for name, file in data.train.items()}
    validation = {name: _count(file, seen.__contains__) for name, file in data.validation.items()}
    return {"train": train, "validation": validation}


def _count(file: TokenFile, is_duplicate: Callable[[int], bool]) -> Duplicates:
    documents, tokens = 0, 0
    for number in range(file.num_documents):
        document = file.document(number)
        digest = hashlib.blake2b(document.tobytes(), digest_size=8).digest()
        if is_duplicate(int.from_bytes(digest, "little")):
            documents, tokens = documents + 1, tokens + len(document)
    return Duplicates(documents, tokens)


@dataclass(frozen=True, slots=True)
class SourceReads:
    """The part of a source that a phase reads. epochs: of the source, by the end of the phase."""

    share: float
    samples: int
    tokens: int
    epochs: float


@dataclass(frozen=True, slots=True)
class PhaseReads:
    """One phase of a run: its steps [first, end), its samples, and what it reads of each source.

    A phase ends between two samples, so a step can belong to two phases.
    error: the largest difference between a source's share and its configured weight.
    """

    first_step: int
    end_step: int
    first_sample: int
    end_sample: int
    period: int
    error: float
    sources: dict[str, SourceReads]


def phase_reads(stream: PhasedStream, samples_per_step: int) -> list[PhaseReads]:
    """All phases of a run, in order."""
    reads: list[PhaseReads] = []
    sizes = {name: windows.size for name, windows in zip(stream.names, stream.windows, strict=True)}
    for phase in stream.blend.phases:
        before, after = stream.blend.cursors(phase.first), stream.blend.cursors(phase.end)
        sources = {
            name: SourceReads(
                share=phase.weights.slots[name] / phase.weights.period,
                samples=after[name] - before[name],
                tokens=(after[name] - before[name]) * stream.seq_len,
                epochs=after[name] / sizes[name],
            )
            for name in stream.names
        }
        steps = phase.first // samples_per_step, -(-phase.end // samples_per_step)
        weights = phase.weights
        reads.append(PhaseReads(*steps, phase.first, phase.end, weights.period, weights.error, sources))
    return reads


def sample_locations(stream: PhasedStream, first: int, count: int) -> list[dict[str, Any]]:
    """Where samples first .. first + count - 1 are read: source, epoch, tokens [begin, end), documents."""
    numbers = np.arange(first, first + count, dtype=np.int64)
    source, start = stream.locate(numbers)
    _, cursor = stream.blend.locate(numbers)
    rows: list[dict[str, Any]] = []
    for number, source_index, begin, turn in zip(
        numbers.tolist(), source, start.tolist(), cursor, strict=True
    ):
        windows = stream.windows[source_index]
        end = begin + stream.seq_len + 1
        documents = windows.file.document_at(begin), windows.file.document_at(end - 1)
        row = {"sample": number, "source": stream.names[source_index], "epoch": int(turn // windows.size)}
        rows.append({**row, "begin": begin, "end": end, "documents": documents})
    return rows
