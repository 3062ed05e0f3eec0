"""The stored matrix, its padding, its blocks and the packed bytes (section 5)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from oracle.floats import ZERO

Rows = list[list[int]]


def ceil_to(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def padded_length(C: int, rht: int) -> int:
    """Cp."""
    return ceil_to(C, max(16, rht))


@dataclass(frozen=True)
class Box:
    """A block of the stored matrix: its place (bi, bj) and its rows and columns, cut at the edges."""

    bi: int
    bj: int
    rows: range
    columns: range

    def cells(self) -> Iterator[tuple[int, int]]:
        return ((i, j) for i in self.rows for j in self.columns)


@dataclass(frozen=True)
class Tiling:
    """R x Cp cut into blocks of br x bc; 0x0 is one block of everything."""

    R: int
    Cp: int
    br: int
    bc: int

    @property
    def counts(self) -> tuple[int, int]:
        if self.br == 0:
            return 1, 1
        return -(-self.R // self.br), -(-self.Cp // self.bc)

    def box(self, bi: int, bj: int) -> Box:
        if self.br == 0:
            return Box(0, 0, range(self.R), range(self.Cp))
        rows = range(bi * self.br, min((bi + 1) * self.br, self.R))
        return Box(bi, bj, rows, range(bj * self.bc, min((bj + 1) * self.bc, self.Cp)))

    def boxes(self) -> Iterator[Box]:
        return (self.box(bi, bj) for bi in range(self.counts[0]) for bj in range(self.counts[1]))

    def table(self, entry: Callable[[Box], int]) -> Rows:
        """One entry per block, as rows."""
        return [[entry(self.box(bi, bj)) for bj in range(self.counts[1])] for bi in range(self.counts[0])]

    def at(self, table: Rows, i: int, j: int) -> int:
        """The entry of the block that holds element (i, j)."""
        return table[0][0] if self.br == 0 else table[i // self.br][j // self.bc]


def stored_rows(x: Rows, shape: tuple[int, int], axis: int, rht: int) -> Rows:
    """Rows of R = the other dimension, along the contraction, padded with +0.0 to Cp."""
    R, C = (shape[0], shape[1]) if axis == 1 else (shape[1], shape[0])
    tail = [ZERO] * (padded_length(C, rht) - C)
    if axis == 1:
        return [list(row) + tail for row in x]
    return [[x[c][r] for c in range(C)] + tail for r in range(R)]


def pack(row: list[int], bits: int) -> list[int]:
    """Bytes of one row of element codes: low nibble first for 4-bit elements."""
    if bits == 8:
        return list(row)
    return [row[j] + 16 * row[j + 1] for j in range(0, len(row), 2)]
