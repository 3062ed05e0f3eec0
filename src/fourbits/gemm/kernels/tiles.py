"""Which tile of the output a program makes, from a model of the card.

Not by timing: the order of FP32 additions, and so the last bits of a run, do not depend on what else the card
was doing when a program started.
"""

import functools
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """A tile of the output, its step along the contraction, pipeline stages and warps."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    #: microseconds of a step and of all that is not steps, as measured on an H100; only ratios matter
    step_time: float
    rest_time: float


class Card(NamedTuple):
    """What tiles depend on."""

    processors: int
    bulk_copies: bool
    tiles: tuple[Tile, ...]


class Work(NamedTuple):
    """How a product is divided: into tiles, and into how many cuts of the contraction."""

    tile: Tile
    cuts: int


_LARGE_MEMORY = (
    Tile(128, 256, 64, 4, 8, 0.62, 3.0),
    Tile(128, 128, 64, 4, 8, 0.37, 1.4),
    Tile(64, 128, 64, 4, 4, 0.31, 1.0),
)
#: sm_100 also keeps sums in tensor memory, and stages the output beside the operands
_TENSOR_MEMORY = tuple(tile._replace(stages=3) for tile in _LARGE_MEMORY)
_SMALL_MEMORY = (Tile(128, 128, 32, 3, 8, 0.19, 1.4), Tile(64, 64, 32, 3, 4, 0.12, 1.0))
_INTERPRETED = Card(8, True, (Tile(32, 32, 32, 1, 4, 1.0, 0.0),))
_CUTS = (1, 2, 4, 8)
#: microseconds to start the kernel that adds cuts, and bytes that it moves in one
_SUM_START, _SUM_RATE = 4.0, 2e6


@functools.cache
def card_of(device: torch.device) -> Card:
    """The card's tiles: shared memory of 227 KiB (sm_90, sm_100) or of about 99 KiB (sm_80, sm_120)."""
    if device.type != "cuda":
        return _INTERPRETED
    facts = torch.cuda.get_device_properties(device)
    tiles = _TENSOR_MEMORY if facts.major == 10 else _LARGE_MEMORY
    if facts.shared_memory_per_block_optin < 220 << 10:
        tiles = _SMALL_MEMORY
    return Card(facts.multi_processor_count, facts.major >= 9, tiles)


@functools.lru_cache(maxsize=4096)
def best_work(card: Card, M: int, N: int, K: int, cuts: tuple[int, ...] = _CUTS) -> Work:
    """The division with the least time: rounds of the whole card times a tile's time, and adding the cuts."""

    def time(work: Work) -> float:
        tile = work.tile
        rounds = ceil_div(ceil_div(M, tile.m) * ceil_div(N, tile.n) * work.cuts, card.processors)
        steps = ceil_div(ceil_div(K, tile.k), work.cuts)
        adding = 0.0 if work.cuts == 1 else _SUM_START + 8.0 * work.cuts * M * N / _SUM_RATE
        return rounds * (steps * tile.step_time + tile.rest_time) + adding

    return min((Work(tile, count) for tile in card.tiles for count in cuts), key=time)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
