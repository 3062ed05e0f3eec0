"""Documents that were met before, exactly or line by line, in a few bytes of memory for each.

A document is remembered by 64 bits of a hash. Among n documents two different ones share them with
probability n^2 / 2^65: three in a million for ten million documents, and then one is taken for the other.
"""

import hashlib
from typing import Literal

import numpy as np

from fourbits.data.corpus import Document

Rule = Literal["none", "exact", "lines"]
_SMALLEST = 1 << 10


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
        return int.from_bytes(digest, "little") or 1


class HashSet:
    """A set of integers in [1, 2^64): a table at most half full, so 16 to 32 bytes for each."""

    def __init__(self) -> None:
        """Begin empty."""
        self._table = np.zeros(_SMALLEST, dtype=np.uint64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, value: int) -> bool:
        """Add a value. Whether it was not there."""
        if 2 * self._count >= len(self._table):
            self._grow()
        slot = self._slot(value)
        if self._table[slot]:
            return False
        self._table[slot] = value
        self._count += 1
        return True

    def __contains__(self, value: int) -> bool:
        return bool(self._table[self._slot(value)])

    def _slot(self, value: int) -> int:
        """Where the value is, or where it would go."""
        table, mask = self._table, len(self._table) - 1
        slot = value & mask
        while (found := int(table[slot])) and found != value:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        """Move into a table of twice the size: all that still miss a slot try their next one, together."""
        values = self._table[self._table != 0]
        self._table = np.zeros(2 * len(self._table), dtype=np.uint64)
        mask = np.uint64(len(self._table) - 1)
        slots = values & mask
        while len(values):
            free = self._table[slots] == 0
            self._table[slots[free]] = values[free]  # of several for one slot, the last stays
            moved = self._table[slots] == values
            values, slots = values[~moved], (slots[~moved] + np.uint64(1)) & mask
