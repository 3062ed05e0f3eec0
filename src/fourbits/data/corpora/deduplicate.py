"""Documents that were met before, exactly or line by line, in a few bytes of memory for each.

A document is remembered by 64 bits of a hash. Among n documents two different ones share them with
probability n^2 / 2^65: three in a million for ten million documents, and then one is taken for the other.
"""

import hashlib
from array import array
from bisect import bisect_left
from typing import Literal

import numpy as np

from fourbits.data.corpora.document import Document

Rule = Literal["none", "exact", "lines"]
_MOST_ADDED = 1 << 10  # values of one part that are not sorted in yet


def normalized(text: str) -> str:
    """The text as the rule "lines" compares it: case, spacing and blank lines make no difference."""
    lines = (" ".join(line.split()) for line in text.casefold().splitlines())
    return "\n".join(line for line in lines if line)


class Deduplicator:
    """Tells whether an equal document came before.

    rule "exact" compares texts, "lines" their `normalized` form, "none" nothing. Pieces of a long text are
    compared by the hash of the whole text, under either rule.
    """

    def __init__(self, rule: Rule) -> None:
        """Begin with nothing met."""
        self.rule = rule
        self.documents, self.num_bytes = 0, 0  # dropped so far
        self._met = HashSet()
        self._within: bool | None = None  # whether the document whose next piece is awaited is a repetition

    def is_repeated(self, document: Document) -> bool:
        """Whether to drop this document, or this piece of one; counts what is dropped."""
        if self.rule == "none" or document.ids is not None:
            return False
        first_piece = self._within is None
        repeated = not self._met.add(self._hash(document)) if first_piece else bool(self._within)
        self._within = repeated if document.more else None
        if repeated:
            self.documents += first_piece
            self.num_bytes += len(document.text.encode())
        return repeated

    def _hash(self, document: Document) -> int:
        if document.more:
            content = document.split_key
        else:
            content = document.text if self.rule == "exact" else normalized(document.text)
        digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


class HashSet:
    """A set of integers in [0, 2^64) in 8 bytes for each, and at most 32 MiB more.

    In 256 parts by their first 8 bits, each a sorted array and a small set of what was added since: one part
    at a time is copied when it grows, where a table would be copied whole.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._sorted: list[array[int]] = [array("Q") for _ in range(256)]
        self._added: list[set[int]] = [set() for _ in range(256)]

    def __len__(self) -> int:
        return sum(map(len, self._sorted)) + sum(map(len, self._added))

    def add(self, value: int) -> bool:
        """Add a value. Whether it was not there."""
        if value in self:
            return False
        part = value >> 56
        added = self._added[part]
        added.add(value)
        if len(added) >= _MOST_ADDED:
            self._sorted[part] = _merged(self._sorted[part], added)
            added.clear()
        return True

    def __contains__(self, value: int) -> bool:
        part = value >> 56
        if value in self._added[part]:
            return True
        values = self._sorted[part]
        place = bisect_left(values, value)
        return place < len(values) and values[place] == value


def _merged(values: "array[int]", added: set[int]) -> "array[int]":
    both = np.concatenate((np.frombuffer(values, dtype=np.uint64), np.fromiter(added, dtype=np.uint64)))
    both.sort()
    return array("Q", both.tobytes())
