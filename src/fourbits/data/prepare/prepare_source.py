"""One source to its token files: read, drop repetitions, encode, split, write; continued after a kill."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourbits.data.corpora.deduplicate import Deduplicator
from fourbits.data.corpora.document import Document, Progress, Source
from fourbits.data.prepare.encode import encode_ahead
from fourbits.data.prepare.progress_file import ProgressFile, Tally
from fourbits.data.prepare.split import Split, fraction_of
from fourbits.data.stream.manifest import SPLITS, describe_files, split_prefix
from fourbits.data.stream.token_file import id_type
from fourbits.data.tokenizer import Tokenizer

# A kill costs the work on this much text, at most.
SAVE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is the same for all sources of one preparation."""

    out: Path
    tokenizer: Tokenizer
    validation_fraction: float
    seed: int
    repeated: Deduplicator
    report: Progress


def prepare_source(source: Source, key: str, to: Preparation) -> dict[str, Any]:
    """Write SOURCE.train and SOURCE.validation. Returns the source's record for the manifest.

    key: what decides the outcome; an earlier call with the same key that was killed is continued.
    Raises ValueError for bad text and for files that change while they are read; OSError for a full disk.
    """
    stamps, progress = source.stamps(), ProgressFile(to.out / source.name, key)
    dropped_before = to.repeated.documents, to.repeated.num_bytes
    tally, state = progress.load() or (Tally(), None)
    dtype = id_type(to.tokenizer.size)
    with Split(to.out / source.name, dtype, to.validation_fraction, to.tokenizer.end_id, state) as split:
        _copy(source, tally, split, progress, to)
        _check_unchanged(source, stamps)
        if not split.state.documents:
            raise ValueError(
                f"data: the source {source.name!r} has no text in its {len(source.files)} files."
            )
        held_out = split.finish()
    total = source.num_bytes or max(tally.text_bytes, 1)
    to.report(source.name, total, total)
    return {
        "licence": source.licence,
        "files": len(source.files),
        "documents": tally.documents,
        "repeated_documents": to.repeated.documents - dropped_before[0],
        "repeated_bytes": to.repeated.num_bytes - dropped_before[1],
        "text_bytes": tally.text_bytes,
        "text_sha256": tally.text_sha256,
        "held_out": held_out,
        **{name: describe_files(split_prefix(to.out / source.name, name)) for name in SPLITS},
    }


def skip_source(source: Source, repeated: Deduplicator) -> None:
    """Let later sources know the documents of one that is finished already."""
    if repeated.rule != "none":
        for document in source.read():
            repeated.is_repeated(document)


def _copy(source: Source, tally: Tally, split: Split, progress: ProgressFile, to: Preparation) -> None:
    """Everything of a source that `tally` has not counted yet, to the split."""
    saved_at, total = tally.text_bytes, source.num_bytes
    numbers: deque[int] = deque()
    kept = _kept(source.read(), tally.read, to.repeated, numbers)
    for batch in encode_ahead(kept, to.tokenizer, split.dtype):
        for document, ids in batch:
            split.add(fraction_of(document.split_key, to.seed), ids, document.more)
            tally.count(document, numbers.popleft())
        position = batch[-1][0].position
        done = tally.text_bytes if position is None else position
        to.report(source.name, min(done, total - 1) if total else done, total)
        if tally.text_bytes - saved_at >= SAVE_BYTES:
            progress.save(tally, split.flush())
            saved_at = tally.text_bytes


def _kept(
    documents: Iterator[Document], skip: int, repeated: Deduplicator, numbers: deque[int]
) -> Iterator[Document]:
    """Documents that are not repeated, without the first `skip`; their numbers, from 1, go to `numbers`."""
    for number, document in enumerate(documents, start=1):
        if not repeated.is_repeated(document) and number > skip:
            numbers.append(number)
            yield document


def _check_unchanged(source: Source, stamps: dict[Path, str]) -> None:
    try:
        now = source.stamps()
    except OSError as error:
        raise ValueError(f"{error.filename}: removed while {source.name!r} was read.") from error
    for path, stamp in stamps.items():
        if now[path] != stamp:
            raise ValueError(f"{path}: changed while it was read; prepare again when it is complete.")
