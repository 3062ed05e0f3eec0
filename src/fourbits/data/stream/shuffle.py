"""A shuffle without a table: a keyed bijection on [0, size).

The integers below `size` are written as (left, right) on a grid of rows x cols >= size, and each round adds
a hash of one half to the other half, modulo that half's range: a Feistel network, hence a bijection of the
grid, for any two ranges. Values outside [0, size) go through the network again until they fall inside
(cycle walking), which keeps the map a bijection on [0, size). Because rows and cols are both close to
sqrt(size), the grid exceeds `size` by less than cols, so cycle walking is rare. Both ideas are in Black and
Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.

All arithmetic is on unsigned 64-bit integers, so the result is the same on every machine.
"""

from math import isqrt

import numpy as np
import numpy.typing as npt

ROUNDS = 8
MAX_SIZE = 1 << 62
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

UInt64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]


def mix64(x: UInt64) -> UInt64:
    """Bijective hash of 64-bit words. x: uint64, any shape -> uint64, same shape.

    The finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def derive_key(*parts: int) -> int:
    """One 64-bit key from any number of integers; order matters."""
    key = 0
    for part in parts:
        word = (key * 3 + (part & _MASK) + _GOLDEN) & _MASK
        key = int(mix64(np.array([word], dtype=np.uint64))[0])
    return key


def derive_keys(base: int, index: Int64) -> UInt64:
    """Many keys from one: key[j] is a hash of (base, index[j]). index: int64 [n] -> uint64 [n]."""
    return mix64(np.uint64(base) ^ mix64((index.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)))


def permute(index: Int64, size: int, keys: UInt64) -> Int64:
    """The shuffled position of each index among `size` items: a bijection on [0, size) for every key.

    index: int64 [n], each in [0, size); keys: uint64 [n] or [1] (one key for all) -> int64 [n] in [0, size).
    """
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(
            f"permute: size must be between 1 and 2**62, got {size}. Permute a part at a time, or nothing "
            "if it is empty."
        )
    if index.size and (int(index.min()) < 0 or int(index.max()) >= size):
        raise ValueError(
            f"permute: every index must be in [0, {size}), got {index.min()} to "
            f"{index.max()}. Pass positions of that range."
        )
    value = _scramble(index.astype(np.uint64), size, keys)
    outside = np.flatnonzero(value >= size)
    while outside.size:
        some_keys = keys if keys.size == 1 else keys[outside]
        value[outside] = _scramble(value[outside], size, some_keys)
        outside = outside[value[outside] >= size]
    return value.astype(np.int64)


def _scramble(value: UInt64, size: int, keys: UInt64) -> UInt64:
    """One pass of the Feistel network on the grid rows x cols >= size."""
    rows = isqrt(size - 1) + 1 if size > 1 else 1
    cols = -(-size // rows)
    rows_u, cols_u = np.uint64(rows), np.uint64(cols)
    left, right = value // cols_u, value % cols_u
    for number in range(ROUNDS):
        round_keys = keys + np.uint64((number + 1) * _GOLDEN & _MASK)
        if number % 2 == 0:
            left = (left + mix64(right ^ round_keys) % rows_u) % rows_u
        else:
            right = (right + mix64(left ^ round_keys) % cols_u) % cols_u
    return left * cols_u + right
