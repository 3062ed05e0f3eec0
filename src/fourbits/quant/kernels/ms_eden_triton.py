"""MS-EDEN inside kernels: block scales corrected for the loss of rounding. docs/nvfp4.md, section 7.7.

The elements of a rotation lie in the rows of a tile, in one thread if the tile is narrow enough, and are
summed by halving, as specified.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.philox_triton import block_words
from fourbits.quant.kernels.rounding_triton import EXPONENT_BITS, bits_of, stochastic_24
from fourbits.quant.reference.philox import SCALE_WORD

_SCALE_WORD = tl.constexpr(SCALE_WORD)


@triton.jit
def halving_sum(x, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums over every SIZE rows by halving: fp32 [ROWS, COLUMNS] -> [ROWS / SIZE, COLUMNS]."""
    GROUPS: tl.constexpr = ROWS // SIZE
    for i in tl.static_range(SIZE.bit_length() - 1):
        halves = tl.reshape(x, (GROUPS, 2, SIZE >> (i + 1), COLUMNS))
        low, high = tl.split(tl.permute(halves, (0, 2, 3, 1)))
        x = tl.reshape(low + high, (GROUPS * (SIZE >> (i + 1)), COLUMNS))
    return x


@triton.jit
def correction(scaled, rounded, scale, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The factor on every block's scale, fp32 of scale's shape; NaN if the rotation has a poisoned block.

    scaled, rounded: of the elements, in blocks of 16 rows; scale: uncorrected, [ROWS / 16, 1, COLUMNS, 1].
    """
    GROUPS: tl.constexpr = ROWS // SIZE
    elements = tl.reshape(tl.abs(scaled), (ROWS, COLUMNS))
    products = elements * tl.reshape(rounded, (ROWS, COLUMNS))
    whole = halving_sum(elements * elements, SIZE, ROWS, COLUMNS)
    kept = halving_sum(products, SIZE, ROWS, COLUMNS)
    ratio = tl.div_rn(whole, kept)
    finite = (bits_of(ratio) & EXPONENT_BITS) != EXPONENT_BITS
    ratio = tl.where((kept != 0.0) & finite, ratio, 1.0)
    bad = tl.reshape((scale != scale).to(tl.int32), (GROUPS, SIZE // 16, COLUMNS))
    ratio = tl.where(tl.max(bad, axis=1) != 0, float("nan"), ratio)
    ratio = tl.broadcast_to(ratio[:, None, :], (GROUPS, SIZE // 16, COLUMNS))
    return tl.reshape(ratio, scale.shape)


@triton.jit
def corrected_scale(scaled, rounded, scale, row, column, key_ptr, stream, FIELDS: tl.constexpr,
                    CONFIG: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Block scales after the correction, rounded stochastically; arguments as in `correction`."""
    SCALE: tl.constexpr = CONFIG.scale
    factor = correction(scaled, rounded, scale, CONFIG.transform.size, ROWS, COLUMNS)
    across = (column + tl.arange(0, COLUMNS))[None, :]
    blocks = (row // 16 + tl.arange(0, ROWS // 16))[:, None]
    words = block_words(key_ptr, stream, FIELDS, across, blocks, _SCALE_WORD)[0]
    corrected = stochastic_24(scale * factor, tl.reshape(words, scale.shape), SCALE)
    return tl.where(factor != factor, float("nan"), corrected)
