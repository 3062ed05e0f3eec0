"""Random bits (section 11): Philox4x32-7, and which word of which counter rounds what."""

from functools import lru_cache
from typing import NamedTuple

ROUNDS = 7
MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
SCALE_WORD, SIGN_WORD = 4, 5


@lru_cache(maxsize=1 << 16)
def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit output words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & MASK,
        )
        k0, k1 = (k0 + INCREMENTS[0]) & MASK, (k1 + INCREMENTS[1]) & MASK
    return c0, c1, c2, c3


class Key(NamedTuple):
    """sr_key of section 11.2."""

    seed: int
    stream: int
    step: int
    first_row: int
    first_block: int

    def words(self, i: int, block: int, word: int) -> tuple[int, int, int, int]:
        """Output of the counter of stored row i and of the 16 elements number `block`."""
        counter = (self.step, self.first_block + block, self.first_row + i, word)
        return philox(tuple(c & MASK for c in counter), (self.seed, self.stream))  # pyright: ignore[reportArgumentType]

    @property
    def gemm(self) -> int:
        return self.stream % 8 // 2

    @property
    def sign_stream(self) -> int:
        """The stream of the signs: role 7 of the same layer."""
        return self.stream // 8 * 8 + 7


def key_of(entries: tuple[int, ...]) -> Key:
    """From five ints, or from two (seed, step)."""
    low = [entry & MASK for entry in entries]
    if len(low) == 2:
        return Key(low[0], 0, low[1], 0, 0)
    return Key(*low)


def byte(key: Key, i: int, j: int) -> int:
    """The 8 bits that round element (i, j) of the stored matrix under `sr`."""
    t = j % 16
    return key.words(i, j // 16, 0)[t // 4] >> 8 * (t % 4) & 255


def word(key: Key, i: int, j: int) -> int:
    """The 32 bits that round element (i, j) of the stored matrix under `sr32`."""
    t = j % 16
    return key.words(i, j // 16, t // 4)[t % 4]


def scale_word(key: Key, i: int, j: int) -> int:
    """The 32 bits that round the scale of the block whose first element is (i, j) (section 7.6)."""
    return key.words(i, j // 16, SCALE_WORD)[j % 16 // 4]


def update_bits(seed: int, step: int, index: int, i: int, j: int) -> int:
    """The 16 bits that round element (i, j) of parameter number `index` (section 18)."""
    t = j % 8
    words = philox((step, j // 8, i, 0), (seed, (index * 8 + 6) & MASK))
    return words[t // 2] >> 16 * (t % 2) & 0xFFFF
