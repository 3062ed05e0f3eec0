"""The two forms of a quantized operand: packed (codes and scales), dequantized (values for a BF16 GEMM)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.formats.codes import decode
from fourbits.formats.packing import pack_nibbles, unpack_nibbles
from fourbits.quant.operand import OperandSpec
from fourbits.quant.scale_codes import SCALE_FORMATS, spread
from fourbits.quant.scale_hierarchy import decode_scales, encode_levels, hierarchy_of

__all__ = ["SCALE_FORMATS", "ExactOperand", "QuantizedTensor", "decode_scales", "spread", "unpacked"]


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """Codes and scales of one operand; value = code * block_scale * global_scale. docs/nvfp4.md, section 5.

    C is the extent of the contraction axis, R that of the other axis, Cp is C rounded up to a multiple of 16
    and of the size of the transform.
    """

    #: uint8 [R, Cp / 2] (even element in the low nibble) or [R, Cp] for 8-bit elements; bf16 and fp32 hold
    #: the values
    codes: Tensor
    #: [ceil(R / r), ceil(Cp / c)] in the format's scale dtype, never replicated, never swizzled; [0, 0]
    #: without blocks; with several levels of scales what their hierarchy stores
    block_scale: Tensor
    #: fp32 scalar; [R, Cp / outer block] for a format with several; 1 where a format has none
    global_scale: Tensor
    #: the contraction axis in the original tensor; for 0 the codes are stored transposed
    axis: int
    #: shape of the original tensor
    shape: tuple[int, int]
    spec: OperandSpec

    @property
    def contraction_size(self) -> int:
        """Extent of the contraction axis before padding: C."""
        return self.shape[self.axis]

    @property
    def rows(self) -> int:
        """R: extent of the other axis."""
        return self.shape[1 - self.axis]

    def t(self) -> "QuantizedTensor":
        """The operand of the transposed tensor: the same codes and scales, transposed; same axis.

        Requires square blocks, which are the same along both axes. Raises ValueError for others, and after a
        transform.
        """
        return _methods.transposed(self)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values in the original shape; after a transform, the transformed tensor, with Cp along the axis.

        fp32(fp32(code * block_scale) * global_scale), then dtype.
        """
        return _methods.dequantized(self, dtype)

    def block_values(self) -> Tensor:
        """code * block_scale, fp32 [R, Cp]: exact for formats whose block scales have few bits."""
        codes = self.element_codes()
        element = self.spec.block_format.element
        if element is None:
            return codes.to(torch.float32)
        if self.spec.block_size is None:
            return decode(codes, element)
        scales = decode_scales(self.block_scale, self.spec.block_format)
        return decode(codes, element) * spread(scales, self.spec.block_size, codes.shape)

    def element_codes(self) -> Tensor:
        """One code per element, uint8 [R, Cp] (values for bf16 and fp32)."""
        element = self.spec.block_format.element
        return unpack_nibbles(self.codes) if element is not None and element.bits == 4 else self.codes


def dequantized(q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The reference of `QuantizedTensor.dequantize`."""
    values = q.block_values()
    values = values * spread(q.global_scale, q.spec.outer_size, values.shape)
    if not q.spec.rht:
        values = values[:, : q.contraction_size]
    return (values.t() if q.axis == 0 else values).to(dtype)


def transposed(q: QuantizedTensor) -> QuantizedTensor:
    """The reference of `QuantizedTensor.t`."""
    _check_square(q.spec, f"QuantizedTensor.t() along axis {q.axis}")
    codes = q.element_codes()[:, : q.contraction_size].t().contiguous()
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 16))  # keeps strides
    element = q.spec.block_format.element
    return replace(
        q,
        codes=pack_nibbles(codes) if element is not None and element.bits == 4 else codes,
        block_scale=_transposed_block_scale(q, codes.shape),
        global_scale=_transposed(q.global_scale, q.spec.outer_size, codes.shape, fill=1.0),
        shape=(q.shape[1], q.shape[0]),
    )


def _transposed_block_scale(q: QuantizedTensor, shape: torch.Size) -> Tensor:
    """Scales of t(), whose codes have this shape. Blocks of padding only have the scale of zeros.

    If a non-finite amax of the tensor made all scales NaN, those of padding are NaN, too.
    """
    size, fmt = q.spec.block_size, q.spec.block_format
    if size is None:
        return q.block_scale
    hierarchy = hierarchy_of(fmt)
    levels = hierarchy.decode(q.block_scale)
    sizes = q.spec.scale_sizes[: len(levels)]
    scale, *shared = (
        _transposed(level, covered, shape, fill=zeros)
        for level, covered, zeros in zip(levels, sizes, hierarchy.of_zeros, strict=True)
    )
    if fmt.has_global_scale and q.global_scale.dim() == 0:
        all_poisoned = torch.isnan(levels[0]).all() & (q.global_scale == 1.0)
        scale = torch.where(all_poisoned, torch.nan, scale)
    return encode_levels((scale, *shared), fmt)


class Methods(NamedTuple):
    """The implementations of QuantizedTensor's methods."""

    dequantized: Callable[[QuantizedTensor, torch.dtype], Tensor]
    transposed: Callable[[QuantizedTensor], QuantizedTensor]


# Kernels take and return QuantizedTensor, so this file cannot import them: quantize.py, which chooses the
# implementations, sets its choice here. Until it is imported the reference runs, with the same bytes.
_methods = Methods(dequantized, transposed)


def set_methods(methods: Methods) -> None:
    """Set the implementations of `QuantizedTensor.dequantize` and `QuantizedTensor.t`."""
    global _methods
    _methods = methods


@dataclass(frozen=True, slots=True)
class ExactOperand:
    """A dequantized operand, ready for a GEMM: value = values * scale, where values are exact in BF16.

    It has the layout of the tensor it was quantized from, so no contraction axis needs a transposed copy.
    """

    #: bf16 (fp32 for format fp32), the original shape with the contraction axis padded to Cp
    values: Tensor
    #: fp32 scalar for the GEMM's epilogue, or [R', C'] where FP32 scales vary along the operand
    scale: Tensor
    axis: int
    spec: OperandSpec

    @property
    def scale_block(self) -> tuple[int, int]:
        """Elements (other axis, contraction axis) under one entry of a 2-D `scale`."""
        size = self.spec.outer_size or self.spec.block_size
        assert size is not None, "a tensor without blocks has one scale"
        return size

    def along(self, axis: int) -> "ExactOperand":
        """The same values with the other contraction axis; square blocks without transform only."""
        if axis == self.axis:
            return self
        _check_square(self.spec, f"ExactOperand.along({axis})")
        return replace(self, axis=axis)


def _check_square(spec: OperandSpec, what: str) -> None:
    """Raises ValueError unless the operand is the same along both axes."""
    for size in spec.scale_sizes:
        if size[0] != size[1]:
            raise ValueError(
                f"{what}: needs square blocks, got one scale for {size[0]}x{size[1]} elements. "
                "Quantize along the other axis instead."
            )
    if spec.rht:
        raise ValueError(
            f"{what}: needs an operand without transform, got rht={spec.rht}. Quantize along the other axis."
        )


def _transposed(scale: Tensor, block: tuple[int, int] | None, shape: torch.Size, fill: float) -> Tensor:
    """The scales of the transposed operand, whose codes have this shape; scalars are unchanged."""
    if scale.dim() == 0 or block is None:
        return scale
    rows, cols = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    moved = scale.t()[:rows, :cols]
    return torch.nn.functional.pad(moved, (0, cols - moved.shape[1], 0, rows - moved.shape[0]), value=fill)


def unpacked(q: QuantizedTensor) -> ExactOperand:
    """A packed operand, dequantized, with contraction axis 1."""
    fmt = q.spec.block_format
    if fmt.element is None:
        return ExactOperand(q.codes, q.global_scale, 1, q.spec)
    if fmt.scale_in_epilogue:
        values = decode(q.element_codes(), fmt.element).to(torch.bfloat16)
        scale = q.global_scale if q.spec.block_size is None else decode_scales(q.block_scale, fmt)
        return ExactOperand(values, scale, 1, q.spec)
    return ExactOperand(q.block_values().to(torch.bfloat16), q.global_scale, 1, q.spec)
