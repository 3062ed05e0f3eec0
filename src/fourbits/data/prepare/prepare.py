"""Text to token files: documents -> tokenizer -> training and validation files of each source -> manifest.

The manifest is written last; a folder that has one is complete. Preparing the same text with the same options
again returns at once; after an interruption or a kill it resumes inside the source where it stopped. The
manifest has no timestamp: equal input gives equal bytes, however often preparing was interrupted.
"""

import hashlib
import json
import platform
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fourbits.data.corpora.deduplicate import Deduplicator, Rule
from fourbits.data.corpora.document import Document, Progress, Source, key_of
from fourbits.data.prepare.prepare_source import Preparation, prepare_source, skip_source
from fourbits.data.prepare.progress_file import ProgressFile
from fourbits.data.prepare.round_trip import MAX_LOST
from fourbits.data.prepare.split import fraction_of
from fourbits.data.stream.dataset import PreparedData
from fourbits.data.stream.manifest import FORMAT, MANIFEST, VERSION, read_manifest
from fourbits.data.tokenizer import Tokenizer
from fourbits.data.whole_file import read_json, require, write_json

# A tokenizer is trained on this much text per token of its vocabulary; more text changes few merges.
_TRAINING_BYTES_PER_TOKEN = 1500
_TOKENIZER = ".tokenizer"  # no source can have this name
_LOCK = ".preparing"
_MAX_TRAINING_BYTES = 128 << 20  # the trainer keeps every distinct word in memory


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """How text becomes token files.

    tokenizer: one to use instead of training one with vocab_size tokens; end_token: its end-of-document token
    if it is not a common one; validation_fraction: share of documents held out, by hash; seed: changes the
    split; deduplicate: which duplicate documents are dropped, within and across sources; max_lost: the
    largest share of a source's characters that the tokenizer may lose (see round_trip.py).
    """

    tokenizer: str | None = None
    end_token: str | None = None
    vocab_size: int = 2048
    validation_fraction: float = 0.05
    seed: int = 0
    deduplicate: Rule = "none"
    max_lost: float = MAX_LOST

    def __post_init__(self) -> None:
        """Raises ValueError for a validation_fraction outside (0, 0.5] or max_lost outside [0, 1]."""
        if not 0 < self.validation_fraction <= 0.5:
            raise ValueError(
                f"validation_fraction must be above 0 and at most 0.5, got {self.validation_fraction}. "
                "The default is 0.05."
            )
        if not 0 <= self.max_lost <= 1:
            raise ValueError(
                f"max_lost must be between 0 and 1, got {self.max_lost}. Set it to 0 to accept no lost text."
            )


def prepare(
    sources: Sequence[Source], out: Path | str, options: PrepareOptions, progress: Progress | None = None
) -> PreparedData:
    """Write the token files of `sources` into the folder `out` and open it.

    Raises ValueError for invalid text or options, or if `out` holds other prepared data; OSError for a full
    disk.
    """
    out, progress = Path(out), progress or (lambda what, done, total: None)
    if not sources:
        raise ValueError("preparing needs at least one source, got none. Name a file or a folder.")
    tokenizer = _load_tokenizer(options)
    request = request_of(sources, options, tokenizer)
    if not (out / MANIFEST).exists():
        out.mkdir(parents=True, exist_ok=True)
        with locked(out):
            if not (out / MANIFEST).exists():  # else another process wrote it while this one waited
                _write_folder(sources, request, options, tokenizer, out, progress)
            # The manifest exists, so a process that locks a new file of this name has nothing to write.
            (out / _LOCK).unlink(missing_ok=True)
    if read_manifest(out)["request"] != request:
        raise ValueError(f"{out}: holds data prepared from other text or options; choose another folder.")
    return PreparedData.open(out)


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold the folder's lock; warn and wait while another process holds it.

    The operating system releases the lock when its process ends, however it ends.
    """
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        warnings.warn(f"{folder}: waiting for another process that prepares it.", stacklevel=3)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write_folder(
    sources: Sequence[Source],
    request: dict[str, Any],
    options: PrepareOptions,
    tokenizer: Tokenizer | None,
    out: Path,
    progress: Progress,
) -> None:
    tokenizer = tokenizer or _train_or_reload(sources, request, options, out, progress)
    tokenizer.save(out / "tokenizer.json")
    deduplicator = Deduplicator(options.deduplicate)
    preparation = Preparation(
        out,
        tokenizer,
        options.validation_fraction,
        options.seed,
        deduplicator,
        progress,
        options.max_lost,
    )
    records = {source.name: _source_record(source, request, preparation) for source in sources}
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
        "deduplicate": options.deduplicate,
        # Outside the sources' records, which identify the tokens: skipped files do not change tokens.
        "reading": {name: record.pop("reading", {}) for name, record in records.items()},
        "sources": records,
    }
    write_json(out / MANIFEST, manifest)
    for name in (*records, _TOKENIZER):
        _record_path(out, name).unlink(missing_ok=True)


def _source_record(source: Source, request: dict[str, Any], preparation: Preparation) -> dict[str, Any]:
    """Prepare a source, unless an interrupted call has finished it. Returns its record for the manifest."""
    path = _record_path(preparation.out, source.name)
    # The key covers what the result depends on; with deduplication that includes all earlier sources.
    if preparation.deduplicator.rule == "none":
        request = {**request, "sources": request["sources"][source.name]}
    key = _sha256([preparation.tokenizer.sha256, request, source.name])
    finished = _finished_record(path, key)
    if finished is not None:
        skip_source(source, preparation.deduplicator, preparation.tokenizer.end_id)
        return finished
    record = prepare_source(source, key, preparation)
    write_json(path, {"key": key, "record": record})
    ProgressFile(preparation.out / source.name, key).remove()
    return record


def request_of(
    sources: Sequence[Source], options: PrepareOptions, tokenizer: Tokenizer | None = None
) -> dict[str, Any]:
    """Everything that determines the result, as plain values: equal requests give equal files.

    tokenizer: the one that the options name, if it is already loaded.
    """
    tokenizer = tokenizer or _load_tokenizer(options)
    return {
        "sources": {
            source.name: {"fingerprint": source.fingerprint(), "licence": source.licence}
            for source in sources
        },
        "tokenizer": tokenizer.sha256 if tokenizer else {"vocab_size": options.vocab_size},
        "validation_fraction": options.validation_fraction,
        "seed": options.seed,
        "deduplicate": options.deduplicate,
    }


def _load_tokenizer(options: PrepareOptions) -> Tokenizer | None:
    return None if options.tokenizer is None else Tokenizer.load(options.tokenizer, options.end_token)


def _train_or_reload(
    sources: Sequence[Source], request: dict[str, Any], options: PrepareOptions, out: Path, progress: Progress
) -> Tokenizer:
    """A tokenizer trained on the sources, by this call or by an interrupted one; saved in `out`."""
    path, record_path = out / "tokenizer.json", _record_path(out, _TOKENIZER)
    key = _sha256(request)
    if _finished_record(record_path, key) is not None and path.is_file():
        return Tokenizer.load(path)
    tokenizer = _train_tokenizer(sources, options, progress)
    tokenizer.save(path)
    write_json(record_path, {"key": key, "record": {}})
    return tokenizer


def _train_tokenizer(sources: Sequence[Source], options: PrepareOptions, progress: Progress) -> Tokenizer:
    for source in sources:
        if source.is_tokenized:
            raise ValueError(f"{source.name!r} is a token file; pass its tokenizer with --tokenizer.")
    total = sum(source.num_bytes for source in sources)
    progress("tokenizer", 0, total)
    num_bytes = min(_TRAINING_BYTES_PER_TOKEN * options.vocab_size, _MAX_TRAINING_BYTES)
    documents = (document for source in sources for document in source.read())
    sample = _training_sample(documents, options, min(1.0, num_bytes / max(total, 1)))
    tokenizer = Tokenizer.train(_limited(2 * num_bytes, sample), options.vocab_size)
    progress("tokenizer", total, total)
    return tokenizer


def _training_sample(documents: Iterable[Document], options: PrepareOptions, share: float) -> Iterator[str]:
    """Sample about `share` of the training documents by hash. Includes the first, so it is never empty."""
    first = True
    for document in documents:
        sample_key = key_of(document.text) if document.more else document.split_key
        is_sampled = fraction_of(sample_key, options.seed + 1) < share
        if first or (
            is_sampled and fraction_of(document.split_key, options.seed) >= options.validation_fraction
        ):
            yield document.text
        first = False


def _finished_record(path: Path, key: str) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    saved = read_json(path)
    require(saved, {"key": str, "record": dict}, path, remedy="delete it and rerun the command")
    return saved["record"] if saved["key"] == key else None


def _limited(limit: int, texts: Iterable[str]) -> Iterator[str]:
    """Stop after about `limit` characters: compressed and streamed sources do not know their length."""
    for text in texts:
        yield text
        limit -= len(text)
        if limit < 0:
            return


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _record_path(out: Path, name: str) -> Path:
    return out / f"{name}.finished.json"
