"""Finds duplicate documents, identical as text or line by line, with a few bytes of memory per document.

A document is represented by a 64-bit hash. Among n documents, two different ones share a hash with
probability n^2 / 2^65 (three in a million for ten million documents); the later one is then dropped.
"""

import hashlib
from array import array
from bisect import bisect_left
from typing import Literal

import numpy as np

from fourbits.data.corpora.document import Document

Rule = Literal["none", "exact", "lines"]
_MAX_UNSORTED = 1 << 10  # values of one part that are not merged into its sorted array yet


def normalized(text: str) -> str:
    """The text as the rule "lines" compares it: case, spacing and blank lines are ignored."""
    lines = (" ".join(line.split()) for line in text.casefold().splitlines())
    return "\n".join(line for line in lines if line)


class Deduplicator:
    """Decides whether a document duplicates an earlier one.

    The rule "exact" compares texts, "lines" their `normalized` form, "none" keeps everything. The pieces of a
    long text are compared by the hash of the whole text, and documents without text by that of their tokens,
    under either rule.
    """

    def __init__(self, rule: Rule) -> None:
        """Start with no documents seen."""
        self.rule = rule
        self.documents, self.num_bytes = 0, 0  # dropped so far
        self._seen = HashSet()
        self._unfinished: bool | None = None  # a text has more pieces to come: whether it is a duplicate

    def is_duplicate(self, document: Document) -> bool:
        """Whether to drop this document, or this piece of one. Counts the dropped documents and bytes."""
        if self.rule == "none":
            return False
        first_piece = self._unfinished is None
        duplicate = not self._seen.add(self._hash(document)) if first_piece else bool(self._unfinished)
        self._unfinished = duplicate if document.more else None
        if duplicate:
            self.documents += first_piece
            self.num_bytes += len(document.text.encode())
        return duplicate

    def _hash(self, document: Document) -> int:
        if document.more or document.tokens is not None:
            content = document.split_key
        else:
            content = document.text if self.rule == "exact" else normalized(document.text)
        digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


class HashSet:
    """A set of integers in [0, 2^64) that takes 8 bytes per value and at most 32 MiB more.

    It has 256 parts, by the top 8 bits of a value; each is a sorted array and a small set of recent values.
    Only one part at a time is copied when it grows, while a hash table would be copied whole.
    """

    def __init__(self) -> None:
        """Create an empty set."""
        self._sorted: list[array[int]] = [array("Q") for _ in range(256)]
        self._unsorted: list[set[int]] = [set() for _ in range(256)]

    def __len__(self) -> int:
        return sum(map(len, self._sorted)) + sum(map(len, self._unsorted))

    def add(self, value: int) -> bool:
        """Add a value. Returns whether it is new."""
        if value in self:
            return False
        part = value >> 56
        unsorted = self._unsorted[part]
        unsorted.add(value)
        if len(unsorted) >= _MAX_UNSORTED:
            self._sorted[part] = _merged(self._sorted[part], unsorted)
            unsorted.clear()
        return True

    def __contains__(self, value: int) -> bool:
        part = value >> 56
        if value in self._unsorted[part]:
            return True
        values = self._sorted[part]
        place = bisect_left(values, value)
        return place < len(values) and values[place] == value


def _merged(values: "array[int]", unsorted: set[int]) -> "array[int]":
    both = np.concatenate((np.frombuffer(values, dtype=np.uint64), np.fromiter(unsorted, dtype=np.uint64)))
    both.sort()
    return array("Q", both.tobytes())
