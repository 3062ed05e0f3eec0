"""Packing of two 4-bit codes per byte, and the scale layout of Blackwell tensor cores. docs/nvfp4.md, 5."""

import torch
from torch import Tensor

_SWIZZLE_ROWS, _SWIZZLE_COLS = 128, 4


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes [..., C] below 16, C even -> uint8 [..., C / 2]; the even column is the low nibble."""
    shape = (*codes.shape[:-1], codes.shape[-1] // 2)
    if codes.shape[-1] % 8 or not codes.numel():
        return (codes[..., ::2] | (codes[..., 1::2] << 4)).reshape(shape)
    words = codes.reshape(-1).view(torch.int64)  # eight codes, one per byte, the first lowest
    pairs = (words | (words >> 4)) & 0x00FF00FF00FF00FF
    quads = (pairs | (pairs >> 8)) & 0x0000FFFF0000FFFF
    return (quads | (quads >> 16)).to(torch.int32).view(torch.uint8).view(shape)


def column_words(codes: Tensor) -> Tensor:
    """Pack sixteen codes of a column into a word, the first lowest: uint8 [C, R] -> int64 [C / 16, R].

    Transposing words instead of codes moves a sixteenth of the elements.
    """
    lane = codes.reshape(codes.shape[0] // 16, 2, 8, codes.shape[1]).to(torch.int32)  # [.., half, code, R]
    half = lane[:, :, 0]
    for i in range(1, 8):
        half = half | (lane[:, :, i] << (4 * i))
    low, high = half[:, 0].to(torch.int64), half[:, 1].to(torch.int64)
    return (low & 0xFFFFFFFF) | (high << 32)


def rows_of_words(words: Tensor) -> Tensor:
    """int64 [C / 16, R] of `column_words` -> uint8 [R, C / 2]: the packed transpose of the codes."""
    return words.t().reshape(-1).view(torch.uint8).view(words.shape[1], words.shape[0] * 8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`: uint8 [..., C / 2] -> uint8 [..., C]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def swizzle_scales(scales: Tensor) -> Tensor:
    """Block scales [R, C16] (one byte each) -> the flat 32x4x4 layout of block-scaled tensor cores.

    Rows are padded to 128 and columns to 4 with zero bytes; element (r, c) goes to
    ((r // 128) * ceil(C16 / 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4 (cuBLAS calls it
    SWIZZLE_32_4_4).
    """
    rows, cols = scales.shape
    tiles_down, tiles_across = -(-rows // _SWIZZLE_ROWS), -(-cols // _SWIZZLE_COLS)
    padded = scales.new_zeros((tiles_down * _SWIZZLE_ROWS, tiles_across * _SWIZZLE_COLS), dtype=torch.uint8)
    padded[:rows, :cols] = scales.view(torch.uint8)
    tiles = padded.view(tiles_down, 4, 32, tiles_across, 4)  # [row tile, r%128//32, r%32, column tile, c%4]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def unswizzle_scales(flat: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of `swizzle_scales`: the flat layout -> [rows, cols]."""
    tiles_down, tiles_across = -(-rows // _SWIZZLE_ROWS), -(-cols // _SWIZZLE_COLS)
    tiles = flat.view(torch.uint8).view(tiles_down, tiles_across, 32, 4, 4)
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(tiles_down * _SWIZZLE_ROWS, tiles_across * _SWIZZLE_COLS)
    return padded[:rows, :cols].contiguous().view(flat.dtype)
