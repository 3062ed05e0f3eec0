"""Philox4x32 random words from counters: the only source of randomness in quantization.

Every random bit is a function of (seed, step, layer, operand role, coordinates), so it is the same on CPU and
GPU, for any tile, micro-batch split, rank count, recomputation or restart. Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011. docs/nvfp4.md, section 11.
"""

import torch
from torch import Tensor

ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_WORD = 0xFFFFFFFF

#: what one operand's random bits are for; the low three bits of a stream
ROLES = ("fprop.lhs", "fprop.rhs", "dgrad.lhs", "dgrad.rhs", "wgrad.lhs", "wgrad.rhs", "update", "signs")
SIGN_ROLE = ROLES.index("signs")
#: fourth counter word, by use; element rounding takes 0, or 0 to 3 for 32 bits
SCALE_WORD = 4
SIGN_WORD = 5


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words per counter. counter: four, key: two broadcastable int64 tensors in [0, 2**32).

    A 32 x 32 product is formed in wrapping int64, whose 64 bits are those of the unsigned product.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW_WORD) ^ c1 ^ k0,
            product1 & _LOW_WORD,
            ((product0 >> 32) & _LOW_WORD) ^ c3 ^ k1,
            product0 & _LOW_WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW_WORD, (k1 + _KEY_STEPS[1]) & _LOW_WORD
    return c0, c1, c2, c3


def words_of_blocks(
    sr_key: Tensor, rows: int, blocks: int, word: int, rows_first: bool
) -> tuple[Tensor, ...]:
    """The four words of every 16-element block.

    sr_key: int64 [5] = (seed, stream, step, first row, first block) -> four int64 tensors, [rows, blocks]
    when rows_first, else [blocks, rows] (the layout of an operand whose contraction axis is 0).
    """
    seed, stream, step, first_row, first_block = sr_key.unbind()
    row = (first_row + torch.arange(rows, device=sr_key.device)) & _LOW_WORD
    block = (first_block + torch.arange(blocks, device=sr_key.device)) & _LOW_WORD
    row, block = (row[:, None], block[None, :]) if rows_first else (row[None, :], block[:, None])
    zero = torch.zeros_like(row + block)
    return philox((step + zero, block + zero, row + zero, zero + word), (seed + zero, stream + zero))


def byte_noise(sr_key: Tensor, rows: int, blocks: int, axis: int) -> Tensor:
    """8 random bits per element, in the layout of the operand.

    -> uint8 [rows, blocks * 16] for axis 1, [blocks * 16, rows] for axis 0. Byte i of a block's 16
    (little-endian words) belongs to element i.
    """
    words = words_of_blocks(sr_key, rows, blocks, 0, axis == 1)
    noise = [(words[i // 4] >> (8 * (i % 4))).to(torch.uint8) for i in range(16)]
    return (
        torch.stack(noise, dim=2 if axis == 1 else 1).flatten(1, 2)
        if axis == 1
        else torch.stack(noise, 1).flatten(0, 1)
    )


def word_noise(sr_key: Tensor, rows: int, blocks: int, axis: int) -> Tensor:
    """32 random bits per element, in the layout of the operand.

    -> int64 in [0, 2**32), shaped as by `byte_noise`. Element i of a block takes word i % 4 of counter word i
    // 4.
    """
    noise: list[Tensor] = []
    for word in range(4):
        noise.extend(words_of_blocks(sr_key, rows, blocks, word, axis == 1))
    return torch.stack(noise, 2).flatten(1, 2) if axis == 1 else torch.stack(noise, 1).flatten(0, 1)


def as_sr_key(sr_key: Tensor) -> Tensor:
    """The full key. sr_key: int64 [5], or [2] = (seed, step) with stream and offsets zero. Raises ValueError
    otherwise.
    """
    if sr_key.dtype != torch.int64 or sr_key.shape not in ((2,), (5,)):
        raise ValueError(
            "sr_key: must be int64 of shape [5] (seed, stream, step, first row, first block) "
            f"or [2] (seed, step), got {sr_key.dtype} {list(sr_key.shape)}."
        )
    sr_key = sr_key & _LOW_WORD
    if sr_key.shape == (5,):
        return sr_key
    zero = torch.zeros_like(sr_key[:1])
    return torch.cat((sr_key[:1], zero, sr_key[1:], zero, zero))
