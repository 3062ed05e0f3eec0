"""Packing is a bijection with the even element in the low nibble."""

import pytest
import torch

from fourbits.formats.packing import (
    column_words,
    pack_nibbles,
    rows_of_words,
    swizzle_scales,
    unpack_nibbles,
    unswizzle_scales,
)
from support.assertions import assert_same_bytes


def test_all_pairs_of_codes_pack_low_nibble_first():
    low, high = torch.arange(16).repeat(16), torch.arange(16).repeat_interleave(16)
    codes = torch.stack((low, high), 1).to(torch.uint8).reshape(16, 32)
    packed = pack_nibbles(codes)
    assert_same_bytes(packed, (low + 16 * high).to(torch.uint8).reshape(16, 16))
    assert_same_bytes(unpack_nibbles(packed), codes)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (1, 2), (5, 6), (3, 48), (2, 3, 16)])
def test_unpacking_undoes_packing_for_any_even_length(shape):
    codes = torch.randint(16, shape, dtype=torch.uint8)
    assert pack_nibbles(codes).shape == (*shape[:-1], shape[-1] // 2)
    assert_same_bytes(unpack_nibbles(pack_nibbles(codes)), codes)


def test_packing_reads_values_not_memory():
    codes = torch.randint(16, (8, 64), dtype=torch.uint8)
    assert_same_bytes(pack_nibbles(codes.t()), pack_nibbles(codes.t().contiguous()))
    assert_same_bytes(pack_nibbles(codes[:, 1:33]), pack_nibbles(codes[:, 1:33].clone()))


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (128, 4), (200, 9), (129, 3)])
def test_each_scale_goes_where_the_tensor_core_reads_it(rows, cols):
    scales = torch.randint(1, 127, (rows, cols), dtype=torch.uint8)
    flat = swizzle_scales(scales)
    tiles_across = -(-cols // 4)
    for r, c in [(0, 0), (rows - 1, cols - 1), (rows // 2, cols // 2)]:
        tile = (r // 128) * tiles_across + c // 4
        place = tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
        assert flat[place] == scales[r, c]
    assert flat.count_nonzero() == rows * cols, "padding bytes are zero"
    assert_same_bytes(unswizzle_scales(flat, rows, cols), scales)


@pytest.mark.parametrize("shape", [(16, 1), (16, 5), (32, 7), (48, 64), (0, 5), (16, 0)])
def test_packed_columns_are_the_packed_transpose(shape):
    codes = torch.randint(16, shape, dtype=torch.uint8)
    assert_same_bytes(rows_of_words(column_words(codes)), pack_nibbles(codes.t()))
