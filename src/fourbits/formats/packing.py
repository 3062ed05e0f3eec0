"""Two 4-bit codes to a byte, and the scale layout of Blackwell's tensor cores. docs/nvfp4.md, "Operand
layout".
"""

import torch
from torch import Tensor


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes [..., C] below 16, C even -> uint8 [..., C / 2]; the even column is the low nibble."""
    flat = codes.reshape(-1)  # a single row may claim any stride, which a view of pairs would reject
    pairs = flat.view(torch.int16)  # low byte: even column
    return ((pairs | (pairs >> 4)) & 0xFF).to(torch.uint8).view(*codes.shape[:-1], codes.shape[-1] // 2)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`: uint8 [..., C / 2] -> uint8 [..., C]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def swizzle_scales(scales: Tensor) -> Tensor:
    """Block scales [R, C16] (one byte each) -> the flat 32x4x4 layout of block-scaled tensor cores.

    Rows are padded to 128 and columns to 4 with zero bytes; element (r, c) goes to
    ((r // 128) * ceil(C16 / 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4 (numerics of
    cuBLAS, SWIZZLE_32_4_4).
    """
    rows, cols = scales.shape
    tiles_down, tiles_across = -(-rows // 128), -(-cols // 4)
    padded = scales.new_zeros((tiles_down * 128, tiles_across * 4), dtype=torch.uint8)
    padded[:rows, :cols] = scales.view(torch.uint8)
    tiles = padded.view(tiles_down, 4, 32, tiles_across, 4)  # [row tile, r%128//32, r%32, column tile, c%4]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def unswizzle_scales(flat: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of `swizzle_scales`: the flat layout -> [rows, cols]."""
    tiles_down, tiles_across = -(-rows // 128), -(-cols // 4)
    tiles = flat.view(torch.uint8).view(tiles_down, tiles_across, 32, 4, 4)
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(tiles_down * 128, tiles_across * 4)
    return padded[:rows, :cols].contiguous().view(flat.dtype)
