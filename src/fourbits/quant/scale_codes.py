"""Encoding and decoding of single block scales, and their blocks. docs/nvfp4.md, section 5."""

import torch
from torch import Tensor

from fourbits.formats.codes import decode, encode
from fourbits.formats.descriptors import E4M3, E8M0, UE5M3
from fourbits.operators import operator

#: block scales on the grid of a small float
SCALE_FORMATS = {"e4m3": E4M3, "ue5m3": UE5M3}
#: storage dtypes of shipped block scales, by scale format
SCALE_DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.float8_e8m0fnu,
    "ue5m3": torch.uint8,
    "fp32": torch.float32,
}


def encode_scale(block_scale: Tensor, scale: str) -> Tensor:
    """fp32 scales that lie on the grid of a scale format, in its dtype. NaN becomes the format's NaN."""
    if scale == "e8m0":
        codes = (block_scale.view(torch.int32) >> 23) & 0xFF  # 2**-127 is subnormal and has code 0
        return _cast(codes.to(torch.uint8), torch.float8_e8m0fnu)
    if scale == "e4m3":
        return block_scale.to(torch.float8_e4m3fn)
    grid = SCALE_FORMATS.get(scale)
    return block_scale if grid is None else encode(block_scale, grid)


def decode_scale(stored: Tensor, scale: str) -> Tensor:
    """Stored scales of a scale format as fp32 of the same shape."""
    if scale == "e4m3":
        return stored.to(torch.float32)
    grid = E8M0 if scale == "e8m0" else SCALE_FORMATS.get(scale)
    return stored if grid is None else decode(_cast(stored, torch.uint8), grid)


def spread(scale: Tensor, block: tuple[int, int] | None, shape: tuple[int, ...]) -> Tensor:
    """Repeat scales over their blocks: [ceil(R / r), ceil(C / c)] -> [R, C]; scalars are unchanged."""
    if scale.dim() == 0 or block is None:
        return scale
    # Not repeat_interleave: torch 2.13 compiles it, with later operations, to reads beyond a partial block.
    down, across = (
        torch.arange(size, device=scale.device, dtype=torch.int64) // step
        for size, step in zip(shape, block, strict=True)
    )
    return scale[down[:, None], across]


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes in another dtype. The compiler does not support E8M0, so it calls an operator."""
    if torch.compiler.is_compiling() and torch.float8_e8m0fnu in (x.dtype, dtype):
        return cast_bytes(x, dtype)
    return x.view(dtype)


def _fake_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@operator("cast_bytes(Tensor x, ScalarType dtype) -> Tensor", _fake_cast)
def cast_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of x, reinterpreted as another one-byte dtype."""
    return x.view(torch.uint8).clone().view(dtype)
