"""Texts to ids while the next texts are read and the last ids are written.

The tokenizer works outside Python's lock, on all cores; reading and writing go on beside it. Never more
than a few batches are in memory, whatever the size of the input, and of long texts never more than two.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from fourbits.data.corpora.document import Document
from fourbits.data.corpora.pieces import PIECE, cut
from fourbits.data.tokenizer import Tokenizer

Ids = npt.NDArray[np.integer]

BATCH_CHARACTERS = 1 << 20
#: batches at the tokenizer at a time: one that it works on, one that keeps it busy when it ends
_WORKERS = 2
_AHEAD = 3
#: characters of waiting batches from which on only one waits
_MOST_WAITING = 8 << 20


def encode_ahead(
    documents: Iterable[Document], tokenizer: Tokenizer, dtype: np.dtype
) -> Iterator[list[tuple[Document, Ids]]]:
    """Batches of documents with their ids, [n] of `dtype`, without end tokens; in order."""
    waiting: deque[tuple[list[Document], Future[list[Ids]]]] = deque()
    with ThreadPoolExecutor(_WORKERS) as pool:
        try:
            for batch in batches(documents):
                waiting.append((batch, pool.submit(_encode, batch, tokenizer, dtype)))
                while len(waiting) >= _AHEAD or (len(waiting) > 1 and _characters(waiting) > _MOST_WAITING):
                    yield _finished(*waiting.popleft())
            while waiting:
                yield _finished(*waiting.popleft())
        finally:
            for _, future in waiting:
                future.cancel()


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in lists of at least 1 MiB characters, the last one maybe of fewer."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += _size(document)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(document: Document) -> int:
    return len(document.text) if document.ids is None else len(document.ids)


def _characters(waiting: Iterable[tuple[list[Document], Future[list[Ids]]]]) -> int:
    return sum(_size(document) for batch, _ in waiting for document in batch)


def _finished(batch: list[Document], future: Future[list[Ids]]) -> list[tuple[Document, Ids]]:
    return list(zip(batch, future.result(), strict=True))


def _encode(batch: Sequence[Document], tokenizer: Tokenizer, dtype: np.dtype) -> list[Ids]:
    if batch[0].ids is not None:
        return [_checked(document, tokenizer).astype(dtype) for document in batch]
    parts: list[list[Ids]] = [[] for _ in batch]
    for group in _groups(batch):
        encoded = tokenizer.encode_batch([piece for _, piece in group])
        for (number, _), ids in zip(group, encoded, strict=True):
            parts[number].append(np.array(ids, dtype=dtype))
    return [ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in parts]


def _groups(batch: Sequence[Document]) -> Iterator[list[tuple[int, str]]]:
    """The pieces of all texts, with the document's number in the batch, in groups for one call each."""
    group: list[tuple[int, str]] = []
    size = 0
    for number, document in enumerate(batch):
        for piece in cut([document.text]) if len(document.text) > PIECE else (document.text,):
            group.append((number, piece))
            size += len(piece)
            if size >= BATCH_CHARACTERS:
                yield group
                group, size = [], 0
    if group:
        yield group


def _checked(document: Document, tokenizer: Tokenizer) -> Ids:
    """The ids of a document that came encoded, without its end token. Raises ValueError for foreign ids."""
    ids = document.ids
    assert ids is not None
    wrong = np.flatnonzero((ids < 0) | (ids >= tokenizer.size))
    if len(wrong):
        raise ValueError(
            f"{document.name}: id {ids[wrong[0]]} at position {wrong[0]} is outside the vocabulary of "
            f"{tokenizer.size}: the file was made with another tokenizer."
        )
    ends = len(ids) and ids[-1] == tokenizer.end_id
    return ids[:-1] if ends else ids
