"""What quantize returns: codes and scales by section 5, its transpose, and dequantization by section 8."""

from dataclasses import dataclass, replace

from oracle.floats import BF16, FP32, NAN, ONE, convert
from oracle.grids import Grid
from oracle.layout import Rows, Tiling, pack, padded_length
from oracle.spec import Spec


@dataclass(frozen=True)
class Operand:
    """codes: element codes (fp32 or bf16 patterns where there is no grid), R rows of Cp, not packed.

    block_scale: rows of scale codes, or of fp32 patterns for fp32-scaled formats; [] where there is none.
    global_scale: one fp32 pattern, or rows of them for nvfp4-double. signs: of the transform.
    saturated: how many blocks (elements, for block 0x0) were saturated by section 7.
    """

    codes: Rows
    block_scale: Rows
    global_scale: int | Rows
    shape: tuple[int, int]
    axis: int
    spec: Spec
    signs: tuple[bool, ...] = ()
    saturated: int = 0

    @property
    def rows(self) -> int:
        return self.shape[1 - self.axis]

    @property
    def length(self) -> int:
        return self.shape[self.axis]

    @property
    def padded(self) -> int:
        return padded_length(self.length, self.spec.rht)

    @property
    def element(self) -> Grid | None:
        return self.spec.kind.element

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.rows, self.padded, *self.spec.blocks)

    @property
    def outer_tiling(self) -> Tiling:
        return Tiling(self.rows, self.padded, *self.spec.outer_blocks)

    def packed(self) -> Rows:
        """Bytes of the rows."""
        assert self.element is not None
        return [pack(row, self.element.bits) for row in self.codes]

    def q(self, i: int, j: int) -> int:
        """decode(code), fp32."""
        code = self.codes[i][j]
        if self.element is None:
            return convert(code, BF16, FP32) if self.spec.format == "bf16" else code
        return self.element.decode(code)

    def s(self, i: int, j: int) -> int:
        """The fp32 block scale of an element; 1 without one."""
        if not self.block_scale and not self.has_block_scale:
            return ONE
        entry = self.tiling.at(self.block_scale, i, j)
        return self.spec.kind.scale.decode(entry) if self.spec.kind.scale else entry

    @property
    def has_block_scale(self) -> bool:
        return self.element is not None and self.spec.blocks != (0, 0)

    def outer(self, i: int, j: int) -> int:
        """The fp32 scale of the tensor or of the element's outer block."""
        if isinstance(self.global_scale, int):
            return self.global_scale
        return self.outer_tiling.at(self.global_scale, i, j)

    def value(self, i: int, j: int) -> int:
        """Section 8, fp32; NaN is the default NaN."""
        if self.element is None:
            return NAN if FP32.is_nan(self.q(i, j)) else self.q(i, j)
        return FP32.mul(FP32.mul(self.q(i, j), self.s(i, j)), self.outer(i, j))

    def dequantize(self) -> Rows:
        """Rows of the logical tensor (cropped), or of the transformed one with Cp entries along the axis."""
        columns = self.padded if self.spec.rht else self.length
        stored = [[self.value(i, j) for j in range(columns)] for i in range(self.rows)]
        if self.axis == 1:
            return stored
        return [[stored[i][j] for i in range(self.rows)] for j in range(columns)]

    def t(self) -> "Operand":
        """The logical transpose: codes and scales moved. Blocks of padding alone are those of zero blocks."""
        br, bc = self.spec.blocks
        square_outer = self.spec.kind.fp32 != "outer" or len(set(self.spec.outer_blocks)) == 1
        if br != bc or not square_outer or self.spec.rht:
            raise ValueError("t() needs square blocks and no rht")
        R, C, Cp = self.length, self.rows, padded_length(self.rows, 0)
        codes = [[self.codes[j][i] if j < C else 0 for j in range(Cp)] for i in range(R)]
        moved = replace(self, codes=codes, shape=(self.shape[1], self.shape[0]))
        scale, outer = self.block_scale, self.global_scale
        if self.has_block_scale:
            scale = transposed(scale, moved.tiling.counts, zero_block_scale(self.spec))
        if not isinstance(outer, int):
            outer = transposed(outer, moved.outer_tiling.counts, ONE)
        return replace(moved, block_scale=scale, global_scale=outer)


def zero_block_scale(spec: Spec) -> int:
    return ONE if spec.kind.fp32 == "block" else 0


def transposed(table: Rows, counts: tuple[int, int], empty: int) -> Rows:
    """table[j][i] for counts entries; `empty` where the table has none."""
    height, width = len(table), len(table[0]) if table else 0

    def entry(i: int, j: int) -> int:
        return table[j][i] if j < height and i < width else empty

    return [[entry(i, j) for j in range(counts[1])] for i in range(counts[0])]
