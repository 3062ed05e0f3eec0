"""Encodes texts to tokens while the next texts are read and earlier tokens are written.

The tokenizer releases the GIL and uses all cores, so reading and writing overlap with it. At most a few
batches are in memory, whatever the size of the input, and at most two when texts are long.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from fourbits.data.corpora.document import Document
from fourbits.data.corpora.pieces import PIECE, split_text
from fourbits.data.tokenizer import Tokenizer

Tokens = npt.NDArray[np.integer]

BATCH_CHARACTERS = 1 << 20
#: tokenizer calls in flight: one running, and one more so that the cores stay busy when it ends
_WORKERS = 2
_AHEAD = 3
#: above this many characters in waiting batches, only one batch waits
_MAX_WAITING = 8 << 20


def encode_ahead(
    documents: Iterable[Document], tokenizer: Tokenizer, dtype: np.dtype
) -> Iterator[list[tuple[Document, Tokens]]]:
    """Yield batches of documents with their tokens, [n] of `dtype`, without end tokens, in order."""
    waiting: deque[tuple[list[Document], Future[list[Tokens]]]] = deque()
    with ThreadPoolExecutor(_WORKERS) as pool:
        try:
            for batch in batches(documents):
                waiting.append((batch, pool.submit(_encode, batch, tokenizer, dtype)))
                while len(waiting) >= _AHEAD or (len(waiting) > 1 and _characters(waiting) > _MAX_WAITING):
                    yield _finished(*waiting.popleft())
            while waiting:
                yield _finished(*waiting.popleft())
        finally:
            for _, future in waiting:
                future.cancel()


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents into lists of at least 1 Mi characters; the last may have fewer."""
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
    return len(document.text) if document.tokens is None else len(document.tokens)


def _characters(waiting: Iterable[tuple[list[Document], Future[list[Tokens]]]]) -> int:
    return sum(_size(document) for batch, _ in waiting for document in batch)


def _finished(batch: list[Document], future: Future[list[Tokens]]) -> list[tuple[Document, Tokens]]:
    return list(zip(batch, future.result(), strict=True))


def _encode(batch: Sequence[Document], tokenizer: Tokenizer, dtype: np.dtype) -> list[Tokens]:
    if batch[0].tokens is not None:
        return [_checked(document, tokenizer).astype(dtype) for document in batch]
    parts: list[list[Tokens]] = [[] for _ in batch]
    for group in _groups(batch):
        encoded = tokenizer.encode_batch([piece for _, piece in group])
        for (number, _), tokens in zip(group, encoded, strict=True):
            parts[number].append(np.array(tokens, dtype=dtype))
    return [pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for pieces in parts]


def _groups(batch: Sequence[Document]) -> Iterator[list[tuple[int, str]]]:
    """Group the pieces of all texts, each with its document's index in the batch, for one tokenizer call."""
    group: list[tuple[int, str]] = []
    size = 0
    for number, document in enumerate(batch):
        for piece in split_text([document.text]) if len(document.text) > PIECE else (document.text,):
            group.append((number, piece))
            size += len(piece)
            if size >= BATCH_CHARACTERS:
                yield group
                group, size = [], 0
    if group:
        yield group


def _checked(document: Document, tokenizer: Tokenizer) -> Tokens:
    """The tokens of an encoded document. Raises ValueError for unknown tokens."""
    tokens = document.tokens
    assert tokens is not None
    wrong = np.flatnonzero((tokens < 0) | (tokens >= tokenizer.size))
    if len(wrong):
        raise ValueError(
            f"{document.name}: token {tokens[wrong[0]]} at position {wrong[0]} is outside the vocabulary of "
            f"{tokenizer.size}. The file was written with another tokenizer; pass that one."
        )
    return tokens
