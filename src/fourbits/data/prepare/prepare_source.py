"""One source to its token files: read, drop duplicates, encode, split, write; resumes after a kill."""

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fourbits.data.corpora.deduplicate import Deduplicator
from fourbits.data.corpora.document import Document, Progress, Source
from fourbits.data.prepare.encode import encode_ahead
from fourbits.data.prepare.identified import identified
from fourbits.data.prepare.progress_file import ProgressFile, Tally
from fourbits.data.prepare.round_trip import RoundTrip
from fourbits.data.prepare.split import Split, fraction_of
from fourbits.data.stream.manifest import SPLITS, describe_files, split_prefix
from fourbits.data.stream.token_file import id_type
from fourbits.data.tokenizer import Tokenizer

# After a kill, at most this much text is encoded again.
SAVE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Preparation:
    """State that all sources of one preparation share."""

    out: Path
    tokenizer: Tokenizer
    validation_fraction: float
    seed: int
    deduplicator: Deduplicator
    progress: Progress
    max_lost: float


def prepare_source(source: Source, key: str, preparation: Preparation) -> dict[str, Any]:
    """Write SOURCE.train and SOURCE.validation. Returns the source's record for the manifest.

    key: a hash of what determines the result; an interrupted call with the same key is resumed.
    Raises ValueError for invalid text and for files that change while they are read; OSError for a full disk.
    """
    stamps, progress = source.stamps(), ProgressFile(preparation.out / source.name, key)
    dropped_before = preparation.deduplicator.documents, preparation.deduplicator.num_bytes
    tally, state = progress.load() or (Tally(), None)
    dtype = id_type(preparation.tokenizer.size)
    with Split(
        preparation.out / source.name,
        dtype,
        preparation.validation_fraction,
        preparation.tokenizer.end_id,
        state,
    ) as split:
        _copy(source, tally, split, progress, preparation)
        _check_unchanged(source, stamps)
        dropped = preparation.deduplicator.documents - dropped_before[0]
        if not split.state.documents:
            raise ValueError(_why_empty(source, dropped, tally.unencodable))
        held_out = split.finish()
    total = source.num_bytes or max(tally.text_bytes, 1)
    preparation.progress(source.name, total, total)
    return {
        "licence": source.licence,
        "files": len(source.files),
        "documents": tally.documents,
        "repeated_documents": dropped,
        "repeated_bytes": preparation.deduplicator.num_bytes - dropped_before[1],
        "text_bytes": tally.text_bytes,
        "text_sha256": tally.text_sha256,
        "held_out": held_out,
        "reading": {
            "skipped_files": {label: asdict(each) for label, each in sorted(source.skipped.items())},
            "unencodable_documents": tally.unencodable,
            "sampled_characters": tally.sampled_characters,
            "lost_characters": tally.lost_characters,
        },
        **{name: describe_files(split_prefix(preparation.out / source.name, name)) for name in SPLITS},
    }


def _why_empty(source: Source, dropped: int, unencodable: int) -> str:
    if unencodable:
        return (
            f"the source {source.name!r} has no tokens: the tokenizer encodes all of its {unencodable:,} "
            f"{'other ' if dropped else ''}documents to nothing. Choose a tokenizer whose vocabulary covers "
            f"this text."
        )
    if dropped:
        return (
            f"the source {source.name!r} has only copies: all of its {dropped:,} documents are among earlier "
            f"ones. Remove it, or prepare without --deduplicate."
        )
    return f"the source {source.name!r} has no text in its {len(source.files)} files."


def skip_source(source: Source, deduplicator: Deduplicator, end_id: int) -> None:
    """Add a finished source to the deduplicator, so that later sources drop its documents."""
    if deduplicator.rule != "none":
        for document in identified(source, end_id):
            deduplicator.is_duplicate(document)


def _copy(
    source: Source, tally: Tally, split: Split, progress: ProgressFile, preparation: Preparation
) -> None:
    """Encode what `tally` does not count yet and add it to the split."""
    saved_at, total = tally.text_bytes, source.num_bytes
    numbers: deque[int] = deque()
    check = RoundTrip(preparation.tokenizer, preparation.max_lost)
    read = identified(source, preparation.tokenizer.end_id)
    documents = _unique(read, tally.read, preparation.deduplicator, numbers)
    for batch in encode_ahead(documents, preparation.tokenizer, split.dtype):
        for document, tokens in batch:
            number = numbers.popleft()
            position = fraction_of(document.split_key, preparation.seed)
            tally.count(document, number, split.add(position, tokens, document.more))
            check.sample(document, number, tally)
        check.check(source.name, tally, at_end=False)
        read_bytes = batch[-1][0].position
        done = tally.text_bytes if read_bytes is None else read_bytes
        preparation.progress(source.name, min(done, total - 1) if total else done, total)
        if tally.text_bytes - saved_at >= SAVE_BYTES:
            progress.save(tally, split.flush())
            saved_at = tally.text_bytes
    check.check(source.name, tally, at_end=True)


def _unique(
    documents: Iterator[Document], skip: int, deduplicator: Deduplicator, numbers: deque[int]
) -> Iterator[Document]:
    """Yield documents after the first `skip`, except duplicates; append their numbers to `numbers`."""
    for number, document in enumerate(documents, start=1):
        if not deduplicator.is_duplicate(document) and number > skip:
            numbers.append(number)
            yield document


def _check_unchanged(source: Source, stamps: dict[Path, str]) -> None:
    try:
        current = source.stamps()
    except OSError as error:
        raise ValueError(f"{error.filename}: removed while {source.name!r} was read.") from error
    for path, stamp in stamps.items():
        if current[path] != stamp:
            raise ValueError(
                f"{path}: changed while it was read; rerun the command when the file is complete."
            )
