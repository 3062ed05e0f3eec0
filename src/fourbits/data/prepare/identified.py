"""Documents as split and deduplication see them: one without text is identified by its tokens."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

from fourbits.data.corpora.document import Document, Source


def identified(source: Source, end_id: int) -> Iterator[Document]:
    """Yield a source's documents; those of token files without end token, keyed by their tokens.

    Copies fall on the same side of the split whichever file they are in, and whether its tokens have 16 or 32
    bits. Documents that consist of an end token are skipped, like blank texts.
    """
    for document in source.read():
        tokens = document.tokens
        if tokens is None:
            yield document
            continue
        if len(tokens) and tokens[-1] == end_id:
            tokens = tokens[:-1]
        if len(tokens):
            key = hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()
            yield replace(document, tokens=tokens, split_key=key)
