"""Inputs that are the same everywhere: integers of a counter-based generator, scaled by powers of two.

PCG64's raw words are part of NumPy's promise of compatibility; torch.randn's last bits depend on the CPU.
"""

import math
import zlib

import numpy as np
import torch
from torch import Tensor

KINDS = ("spread", "grid", "nonfinite", "zeros", "tiny", "huge")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def raw(count: int, name: str) -> np.ndarray:
    """count words of 64 random bits, by name."""
    return np.random.PCG64(zlib.crc32(name.encode())).random_raw(count)


def bell(shape: tuple[int, ...], name: str) -> Tensor:
    """Nearly normal fp32 numbers: the sum of four uniform ones, exact, of deviation 1.15."""
    words = raw(math.prod(shape), name)
    pieces = [(words >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4)]
    sums = np.stack(pieces).sum(0).astype(np.int64)
    return torch.from_numpy((sums - 131070).astype(np.float32) * np.float32(2.0**-15)).reshape(shape)


def exponents(shape: tuple[int, int], name: str) -> Tensor:
    """Powers of two that differ from tile to tile of 16x16 by 15 octaves and from row to row by 4."""
    tiles = -(-shape[0] // 16), -(-shape[1] // 16)
    tile = (raw(math.prod(tiles), f"tile {name}") % np.uint64(15)).astype(np.int32).reshape(tiles)
    row = (raw(shape[0], f"row {name}") % np.uint64(4)).astype(np.int32)
    tile = tile.repeat(16, 0).repeat(16, 1)[: shape[0], : shape[1]]
    return torch.from_numpy(np.ldexp(np.float32(1), tile + row[:, None] - 9))


def matrix(shape: tuple[int, int], kind: str, dtype: torch.dtype, name: str = "") -> Tensor:
    """One input. kind: of KINDS."""
    name = f"{kind} {shape} {name}"
    words = torch.from_numpy((raw(math.prod(shape), f"choice {name}") >> np.uint64(32)).astype(np.int64))
    words = words.reshape(shape)
    if kind == "grid":  # many ties, if the amax makes every scale a power of two
        return ((words % 49 - 24).float() / 4).to(dtype)
    x = bell(shape, name) * exponents(shape, name)
    narrow = dtype is torch.float16
    if kind == "tiny":
        x = x * 2.0 ** (-18 if narrow else -138)
    elif kind == "huge":
        x = x * 2.0 ** (13 if narrow else 124)
    elif kind == "zeros":  # of both signs, whole blocks of them
        signed = torch.where(words % 2 == 0, 0.0, -0.0)
        x = torch.where((exponents(shape, name) < 0.25) | (words % 3 == 0), signed, x)
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    if kind == "nonfinite":
        for which, value in enumerate((math.nan, math.inf, -math.inf, 0.0, -0.0)):
            x = torch.where(words % 149 == which, value, x)
    return x.to(dtype)
