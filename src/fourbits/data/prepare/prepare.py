"""Text to token files: documents -> tokenizer -> train and validation files of every source -> manifest.

A folder is complete when its manifest exists, which is written last. Preparing again with the same text and
options returns at once; after an interruption, a kill included, it continues in the source where it stopped.
The manifest has no time stamp: equal input gives equal bytes, however often it was interrupted.
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
from fourbits.data.prepare.split import fraction_of
from fourbits.data.stream.dataset import PreparedData
from fourbits.data.stream.manifest import FORMAT, MANIFEST, VERSION, read_manifest
from fourbits.data.tokenizer import Tokenizer
from fourbits.data.whole_file import read_json, write_json

# A tokenizer learns from this much text per token of its vocabulary; more text changes few merges.
_TRAINING_BYTES_PER_TOKEN = 1500
_TOKENIZER = ".tokenizer"  # no source is called so
_LOCK = ".preparing"
_MOST_TRAINING_BYTES = 128 << 20  # the trainer holds every different word of it


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """How text becomes token files.

    tokenizer: a tokenizer.json to use instead of training one of vocab_size; end_token: its end-of-document
    token if it is not a usual one; validation_fraction: share of documents held out, by hash; seed: turns
    the split; deduplicate: which repeated documents are left out, within and across sources.
    """

    tokenizer: str | None = None
    end_token: str | None = None
    vocab_size: int = 2048
    validation_fraction: float = 0.05
    seed: int = 0
    deduplicate: Rule = "none"

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
    given = None if options.tokenizer is None else Tokenizer.load(options.tokenizer, options.end_token)
    request = request_of(sources, options, given)
    if not (out / MANIFEST).exists():
        out.mkdir(parents=True, exist_ok=True)
        with locked(out):
            if not (out / MANIFEST).exists():  # else another process wrote it while this one waited
                _write_folder(sources, request, options, given, out, report)
            # The manifest exists, so a process that locks a new file of this name has nothing to write.
            (out / _LOCK).unlink(missing_ok=True)
    if read_manifest(out)["request"] != request:
        raise ValueError(f"{out}: holds data prepared from other text or options; name another folder.")
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
    given: Tokenizer | None,
    out: Path,
    report: Progress,
) -> None:
    tokenizer = given or _own_tokenizer(sources, request, options, out, report)
    tokenizer.save(out / "tokenizer.json")
    repeated = Deduplicator(options.deduplicate)
    to = Preparation(out, tokenizer, options.validation_fraction, options.seed, repeated, report)
    records = {source.name: _record_of(source, request, to) for source in sources}
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
        "sources": records,
    }
    write_json(out / MANIFEST, manifest)
    for name in (*records, _TOKENIZER):
        _record_path(out, name).unlink(missing_ok=True)


def _record_of(source: Source, request: dict[str, Any], to: Preparation) -> dict[str, Any]:
    """The record of a source that is prepared now, or was by an earlier call that did not come to its end."""
    path = _record_path(to.out, source.name)
    # What the outcome depends on: with deduplication, all that came before it, too.
    if to.repeated.rule == "none":
        request = {**request, "sources": request["sources"][source.name]}
    key = hashlib.sha256(json.dumps([to.tokenizer.sha256, request, source.name]).encode()).hexdigest()
    finished = _finished_record(path, key)
    if finished is not None:
        skip_source(source, to.repeated)
        return finished
    record = prepare_source(source, key, to)
    write_json(path, {"key": key, "record": record})
    ProgressFile(to.out / source.name, key).remove()
    return record


def request_of(
    sources: Sequence[Source], options: PrepareOptions, given: Tokenizer | None = None
) -> dict[str, Any]:
    """What was asked, in a form that equals another request exactly if the outcome would be the same.

    given: the tokenizer that the options name, if it was loaded already.
    """
    if options.tokenizer is not None and given is None:
        given = Tokenizer.load(options.tokenizer, options.end_token)
    return {
        "sources": {
            source.name: {"fingerprint": source.fingerprint(), "licence": source.licence}
            for source in sources
        },
        "tokenizer": given.sha256 if given else {"vocab_size": options.vocab_size},
        "validation_fraction": options.validation_fraction,
        "seed": options.seed,
        "deduplicate": options.deduplicate,
    }


def _own_tokenizer(
    sources: Sequence[Source], request: dict[str, Any], options: PrepareOptions, out: Path, report: Progress
) -> Tokenizer:
    """A tokenizer trained on the sources, now or by an earlier call; saved in `out`."""
    path, done = out / "tokenizer.json", _record_path(out, _TOKENIZER)
    key = hashlib.sha256(json.dumps(request).encode()).hexdigest()
    if _finished_record(done, key) is not None and path.is_file():
        return Tokenizer.load(path)
    tokenizer = _trained(sources, options, report)
    tokenizer.save(path)
    write_json(done, {"key": key, "record": {}})
    return tokenizer


def _trained(sources: Sequence[Source], options: PrepareOptions, report: Progress) -> Tokenizer:
    for source in sources:
        if source.has_ids:
            raise ValueError(f"data: {source.name!r} is a token file; name its tokenizer with --tokenizer.")
    total = sum(source.num_bytes for source in sources)
    report("tokenizer", 0, total)
    wanted = min(_TRAINING_BYTES_PER_TOKEN * options.vocab_size, _MOST_TRAINING_BYTES)
    documents = (document for source in sources for document in source.read())
    sample = _training_sample(documents, options, min(1.0, wanted / max(total, 1)))
    tokenizer = Tokenizer.train(_at_most(2 * wanted, sample), options.vocab_size)
    report("tokenizer", total, total)
    return tokenizer


def _training_sample(documents: Iterable[Document], options: PrepareOptions, share: float) -> Iterator[str]:
    """Training documents, thinned by hash to about `share`; with the first one always, so never empty."""
    first = True
    for document in documents:
        own_key = key_of(document.text) if document.more else document.split_key
        kept = fraction_of(own_key, options.seed + 1) < share
        if first or (kept and fraction_of(document.split_key, options.seed) >= options.validation_fraction):
            yield document.text
        first = False


def _finished_record(path: Path, key: str) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    saved = read_json(path)
    return saved["record"] if saved["key"] == key else None


def _at_most(limit: int, texts: Iterable[str]) -> Iterator[str]:
    """Texts up to about `limit` characters: compressed and streamed sources do not say how long they are."""
    for text in texts:
        yield text
        limit -= len(text)
        if limit < 0:
            return


def _record_path(out: Path, name: str) -> Path:
    return out / f"{name}.finished.json"
