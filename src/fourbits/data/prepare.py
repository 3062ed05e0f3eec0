"""Text to token files: documents -> tokenizer -> train and validation files of every source -> manifest.

A folder is complete when its manifest exists, which is written last. Preparing again with the same text and
options returns at once; after an interruption the sources already finished are kept. The manifest has no time
stamp: equal input gives equal bytes.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fourbits.data.corpus import Document, Source
from fourbits.data.dataset import (
    FORMAT,
    MANIFEST,
    SPLITS,
    VERSION,
    PreparedData,
    describe_files,
    read_manifest,
)
from fourbits.data.token_file import TokenFileWriter, id_type
from fourbits.data.tokenizer import Tokenizer
from fourbits.data.whole_file import write_json

# progress(what, bytes done, bytes in all)
Progress = Callable[[str, int, int], None]

_BATCH_CHARACTERS = 1 << 20
# A tokenizer learns from this much text per token of its vocabulary; more text changes few merges.
_TRAINING_BYTES_PER_TOKEN = 1500


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """How text becomes token files.

    tokenizer: a tokenizer.json to use instead of training one of vocab_size; end_token: its end-of-document
    token if it is not a usual one; validation_fraction: share of documents held out, by hash; seed: turns
    the split.
    """

    tokenizer: str | None = None
    end_token: str | None = None
    vocab_size: int = 2048
    validation_fraction: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for a fraction outside (0, 0.5]."""
        if not 0 < self.validation_fraction <= 0.5:
            raise ValueError(
                f"data: validation_fraction must be above 0 and at most 0.5, got {self.validation_fraction}."
            )


def prepare(
    sources: Sequence[Source], out: Path | str, options: PrepareOptions, progress: Progress | None = None
) -> PreparedData:
    """Write the token files of `sources` into the folder `out` and open it.

    Raises ValueError for bad text, options, or an `out` that holds other prepared data; OSError for a full
    disk.
    """
    out, report = Path(out), progress or (lambda what, done, total: None)
    if not sources:
        raise ValueError("data: no source was named.")
    request = request_of(sources, options)
    if (out / MANIFEST).exists():
        if read_manifest(out)["request"] == request:
            return PreparedData.open(out)
        raise ValueError(f"{out}: holds data prepared from other text or options; name another folder.")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(sources, options, report)
    tokenizer.save(out / "tokenizer.json")
    records = {source.name: _prepare_source(source, out, tokenizer, options, report) for source in sources}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "request": request,
        "python": platform.python_version(),
        "tokenizer": {
            "sha256": tokenizer.sha256,
            "size": tokenizer.size,
            "vocab_size": tokenizer.vocab_size,
            "end_token": tokenizer.end_token,
            "end_id": tokenizer.end_id,
        },
        "sources": records,
    }
    write_json(out / MANIFEST, manifest)
    for source in sources:
        _record_path(out, source).unlink(missing_ok=True)
    return PreparedData.open(out)


def request_of(sources: Sequence[Source], options: PrepareOptions) -> dict[str, Any]:
    """What was asked, in a form that equals another request exactly if the outcome would be the same."""
    given = None
    if options.tokenizer is not None:
        given = Tokenizer.load(options.tokenizer, options.end_token).sha256
    return {
        "sources": {source.name: source.fingerprint() for source in sources},
        "tokenizer": given or {"vocab_size": options.vocab_size},
        "validation_fraction": options.validation_fraction,
        "seed": options.seed,
    }


def _tokenizer(sources: Sequence[Source], options: PrepareOptions, report: Progress) -> Tokenizer:
    if options.tokenizer is not None:
        return Tokenizer.load(options.tokenizer, options.end_token)
    total = sum(source.num_bytes for source in sources)
    report("tokenizer", 0, total)
    share = min(1.0, _TRAINING_BYTES_PER_TOKEN * options.vocab_size / max(total, 1))
    documents = (document for source in sources for document in source.read())
    tokenizer = Tokenizer.train(_training_sample(documents, options, share), options.vocab_size)
    report("tokenizer", total, total)
    return tokenizer


def _training_sample(documents: Iterable[Document], options: PrepareOptions, share: float) -> Iterator[str]:
    """Training documents, thinned by hash to about `share`; with the first one always, so never empty."""
    first = True
    for document in documents:
        kept = _fraction_of(document, options.seed + 1) < share
        if first or (kept and _fraction_of(document, options.seed) >= options.validation_fraction):
            yield document.text
        first = False


def _fraction_of(document: Document, seed: int) -> float:
    """A number in [0, 1) that is a hash of the seed and the document's split key."""
    digest = hashlib.sha256(f"{seed}:{document.split_key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _prepare_source(
    source: Source, out: Path, tokenizer: Tokenizer, options: PrepareOptions, report: Progress
) -> dict[str, Any]:
    key = f"{options.seed}:{options.validation_fraction}:{tokenizer.sha256}:{source.fingerprint()}"
    finished = _finished_record(out, source, key)
    if finished is not None:
        return finished
    text_hash, num_documents, num_bytes = hashlib.sha256(), 0, 0
    prefixes = [out / f"{source.name}.{split}" for split in SPLITS]
    with (
        TokenFileWriter(prefixes[0], id_type(tokenizer.size)) as train,
        TokenFileWriter(prefixes[1], id_type(tokenizer.size)) as validation,
    ):
        split = _Split(train, validation, options.validation_fraction, tokenizer.end_id)
        for batch in _batches(source.read()):
            for document, ids in zip(batch, tokenizer.encode_batch([d.text for d in batch]), strict=True):
                split.add(_fraction_of(document, options.seed), ids)
                raw = document.text.encode()
                text_hash.update(raw + b"\0")
                num_documents, num_bytes = num_documents + 1, num_bytes + len(raw)
            report(source.name, min(num_bytes, source.num_bytes - 1), source.num_bytes)
        if not num_documents:
            raise ValueError(
                f"data: the source {source.name!r} has no text in its {len(source.files)} files."
            )
        held_out = split.finish()
    report(source.name, source.num_bytes, source.num_bytes)
    record = {
        "licence": source.licence,
        "files": len(source.files),
        "documents": num_documents,
        "text_bytes": num_bytes,
        "text_sha256": text_hash.hexdigest(),
        "held_out": held_out,
        **{name: describe_files(prefix) for name, prefix in zip(SPLITS, prefixes, strict=True)},
    }
    write_json(_record_path(out, source), {"key": key, "record": record})
    return record


@dataclass(slots=True)
class _Split:
    """Sends documents to validation if their hash is below the fraction, and never leaves a side empty.

    Until both sides have text, some documents wait. If one side stays empty, the documents of lowest hash are
    the validation text; a source of one document gives its tail.
    """

    train: TokenFileWriter
    validation: TokenFileWriter
    fraction: float
    end_id: int
    sides: set[bool] = field(default_factory=set)
    waiting: list[tuple[float, np.ndarray]] = field(default_factory=list)

    def add(self, position: float, ids: list[int]) -> None:
        """position: the document's hash in [0, 1); ids: without the end token."""
        ids.append(self.end_id)
        document = np.array(ids, dtype=self.train.dtype)
        held_out = position < self.fraction
        self.sides.add(held_out)
        if len(self.sides) == 2:
            self._release()
            (self.validation if held_out else self.train).add(document)
        elif held_out or not self.waiting or position <= self.waiting[0][0]:
            if not held_out and self.waiting and position < self.waiting[0][0]:
                self._release()  # only the lowest hash can become the validation text
            self.waiting.append((position, document))
        else:
            self.train.add(document)

    def finish(self) -> str:
        """Place what waits, and say how the validation text was chosen."""
        if len(self.sides) == 2:
            return "documents by hash"
        lowest = min(position for position, _ in self.waiting)
        for position, document in self.waiting:
            if position > lowest:
                self.train.add(document)
        chosen = [document for position, document in self.waiting if position == lowest]
        if self.train.num_documents:
            for document in chosen:
                self.validation.add(document)
            return "the documents of lowest hash, as the fraction left one side empty"
        whole = np.concatenate(chosen)
        cut = min(max(1, round(len(whole) * (1 - self.fraction))), len(whole) - 1)
        self.train.add(whole[:cut])
        self.validation.add(whole[cut:])
        return "the tail of the only document"

    def _release(self) -> None:
        for position, document in self.waiting:
            (self.validation if position < self.fraction else self.train).add(document)
        self.waiting.clear()


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _finished_record(out: Path, source: Source, key: str) -> dict[str, Any] | None:
    path = _record_path(out, source)
    if not path.is_file():
        return None
    saved = json.loads(path.read_text(encoding="utf-8"))
    return saved["record"] if saved["key"] == key else None


def _record_path(out: Path, source: Source) -> Path:
    return out / f"{source.name}.finished.json"
