"""Tensors to patterns and back: the only file of the oracle that knows torch."""

import torch
from torch import Tensor

from oracle.floats import BF16, FP16, FP32, convert
from oracle.layout import Rows

WIDE = {
    torch.float32: (torch.int32, FP32),
    torch.bfloat16: (torch.int16, BF16),
    torch.float16: (torch.int16, FP16),
}


def patterns(x: Tensor) -> Rows:
    """Rows of fp32 patterns of a 2-D float tensor."""
    integer, binary = WIDE[x.dtype]
    raw = x.detach().contiguous().view(integer).tolist()
    bits = 32 if integer is torch.int32 else 16
    return [[convert(p % (1 << bits), binary, FP32) for p in row] for row in raw]


def raw_bits(x: Tensor) -> list:
    """Unsigned patterns of any tensor, nested as its shape."""
    size = x.element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    flat = x.detach().contiguous().view(integer).reshape(-1).to(torch.int64) % (1 << 8 * size)
    return flat.reshape(x.shape).tolist()


def tensor(rows: Rows, columns: int = 0) -> Tensor:
    """fp32 tensor of rows of patterns; `columns` is the width of a matrix without rows."""
    width = len(rows[0]) if rows else columns
    flat = torch.tensor([p for row in rows for p in row], dtype=torch.int64)
    return (flat - ((flat >> 31) << 32)).to(torch.int32).view(torch.float32).reshape(len(rows), width)
