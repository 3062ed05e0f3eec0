"""Philox4x32 random words from counters: the only source of randomness in quantization.

Every random bit is a function of (seed, step, layer, operand role, coordinates), so it is the same on CPU and
GPU, for any tile, micro-batch split, rank count, recomputation or restart. Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011. docs/nvfp4.md, section 11.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from fourbits.quant.operand import OperandSpec
from fourbits.quant.request import ROLES

P = ParamSpec("P")
T = TypeVar("T")

ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_WORD = 0xFFFFFFFF

SIGN_ROLE = ROLES.index("signs")
#: fourth counter word, by use; element rounding takes 0, or 0 to 3 for 32 bits
SCALE_WORD = 4
SIGN_WORD = 5


def computed_once(function: Callable[P, T]) -> Callable[P, T]:
    """A function of hashable arguments that returns constant tensors, which are kept.

    Under a dispatch mode (fake tensors, a trace) they belong to the mode, and are not kept.
    """
    kept = functools.cache(function)

    @functools.wraps(function)
    def constants(*arguments: P.args, **options: P.kwargs) -> T:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # pyright: ignore
            return function(*arguments, **options)
        return kept(*arguments, **options)

    return constants


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words per counter. counter: four, key: two broadcastable int64 tensors in [0, 2**32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW_WORD, (k1 + _KEY_STEPS[1]) & _LOW_WORD
    return c0, c1, c2, c3


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of word * multiplier, both below 2**32.

    In two halves, because the whole product may exceed int64, and overflow is undefined in C++.
    """
    lower = word * (multiplier & 0xFFFF)
    upper = word * (multiplier >> 16) + (lower >> 16)
    return upper >> 16, ((upper & 0xFFFF) << 16) | (lower & 0xFFFF)


def words_at(sr_key: Tensor, rows: Tensor, units: Tensor, word: int) -> tuple[Tensor, ...]:
    """The four words of 16-element units. sr_key: int64 [5] = (seed, stream, step, first row, first block).

    rows, units: int64, broadcastable: stored row, and 16-element unit along the contraction, from the first.
    """
    seed, stream, step, first_row, first_block = sr_key.unbind()
    row, unit = (first_row + rows) & _LOW_WORD, (first_block + units) & _LOW_WORD
    zero = torch.zeros_like(row + unit)
    return philox((step + zero, unit + zero, row + zero, zero + word), (seed + zero, stream + zero))


def element_noise(sr_key: Tensor | None, spec: OperandSpec, shape: torch.Size, axis: int) -> Tensor | None:
    """Random integers for the elements of a tensor of this shape, padded; None where rounding draws none."""
    if spec.rounding != "sr" and spec.rounding != "sr32":
        return None
    assert sr_key is not None, "stochastic rounding is called with a key"
    return as_elements(element_bits(sr_key, spec.rounding, shape[1 - axis], shape[axis] // 16, axis), shape)


def scale_words(sr_key: Tensor | None, spec: OperandSpec, grid: tuple[int, int], axis: int) -> Tensor | None:
    """32 random bits for each block of a grid, where block scales round stochastically; else None."""
    if spec.scale_rounding != "sr" and spec.rounding != "ms-eden":
        return None
    assert sr_key is not None, "stochastic rounding is called with a key"
    assert spec.block_size is not None
    return scale_noise(sr_key, spec.block_size, grid, axis)


def element_bits(sr_key: Tensor, rounding: str, rows: int, units: int, axis: int) -> Tensor:
    """Random bits of rows of 16-element units, for `sr` or `sr32`; `as_elements` reads them."""
    if rounding == "sr32":
        return word_noise(sr_key, rows, units, axis)
    return column_bytes(sr_key, rows, units) if axis == 0 else row_bytes(sr_key, rows, units)


def as_elements(bits: Tensor, shape: torch.Size) -> Tensor:
    """One integer per element, in the layout of a tensor of this shape."""
    return (bits.view(torch.uint8) if bits.dtype == torch.int64 else bits).reshape(shape)


def row_bytes(sr_key: Tensor, rows: int, units: int) -> Tensor:
    """8 random bits per element for rows along the contraction, eight to a number: int64 [rows, units, 2].

    Byte i of a unit's 16 (little-endian words) belongs to element i.
    """
    w = _unit_words(sr_key, rows, units, 0, 1)
    return torch.stack((w[0] | (w[1] << 32), w[2] | (w[3] << 32)), 2)


def column_bytes(sr_key: Tensor, rows: int, units: int) -> Tensor:
    """The same bytes for columns along the contraction: uint8 [units, 16, rows]."""
    words = _unit_words(sr_key, rows, units, 0, 0)
    return torch.stack([(words[i // 4] >> (8 * (i % 4))).to(torch.uint8) for i in range(16)], 1)


def word_noise(sr_key: Tensor, rows: int, units: int, axis: int) -> Tensor:
    """32 random bits per element: int32 [rows, units, 16] for axis 1, [units, 16, rows] for axis 0.

    Element i of a unit takes word i % 4 of counter word i // 4.
    """
    noise: list[Tensor] = []
    for word in range(4):
        noise.extend(_unit_words(sr_key, rows, units, word, axis))
    return torch.stack([word.to(torch.int32) for word in noise], 1 + axis)


def scale_noise(sr_key: Tensor, block: tuple[int, int], grid: tuple[int, int], axis: int) -> Tensor:
    """32 random bits per block, int32 of the grid's shape, in the layout of the operand.

    block: (other axis, contraction axis); a block takes its first row and the word of its first element.
    """
    rows = torch.arange(grid[1 - axis], device=sr_key.device, dtype=torch.int64) * block[0]
    starts = torch.arange(grid[axis], device=sr_key.device, dtype=torch.int64) * block[1]
    rows, starts = (rows[:, None], starts[None, :]) if axis == 1 else (rows[None, :], starts[:, None])
    words = words_at(sr_key, rows, starts // 16, SCALE_WORD)
    chosen = words[0]
    if block[1] % 16:  # else every block starts at a unit
        place = (starts % 16) // 4
        for i in range(1, 4):
            chosen = torch.where(place == i, words[i], chosen)
    return chosen.to(torch.int32)


def _unit_words(sr_key: Tensor, rows: int, units: int, word: int, axis: int) -> tuple[Tensor, ...]:
    """Four int64 tensors, [rows, units] for axis 1, [units, rows] for axis 0."""
    row, unit = (
        torch.arange(rows, device=sr_key.device, dtype=torch.int64),
        torch.arange(units, device=sr_key.device, dtype=torch.int64),
    )
    row, unit = (row[:, None], unit[None, :]) if axis == 1 else (row[None, :], unit[:, None])
    return words_at(sr_key, row, unit, word)


def as_sr_key(sr_key: Tensor) -> Tensor:
    """The full key. sr_key: int64 [5], or [2] = (seed, step) with stream and offsets zero. Raises ValueError
    otherwise.
    """
    if getattr(sr_key, "dtype", None) != torch.int64 or sr_key.shape not in ((2,), (5,)):
        raise ValueError(
            "sr_key: must be an int64 tensor of shape [5] (seed, stream, step, first row, first block) "
            f"or [2] (seed, step), got {sr_key!r:.80}. Build it as in torch.tensor([seed, step])."
        )
    sr_key = sr_key & _LOW_WORD
    if sr_key.shape == (5,):
        return sr_key
    zero = torch.zeros_like(sr_key[:1])
    return torch.cat((sr_key[:1], zero, sr_key[1:], zero, zero))
