"""The two forms of a quantized operand: packed (codes and scales) and exact (values ready for a BF16 or FP32
GEMM).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fourbits.formats.codes import decode, encode
from fourbits.formats.descriptors import E4M3, UE5M3, BlockFormat
from fourbits.formats.packing import pack_nibbles, unpack_nibbles
from fourbits.quant.operand import OperandSpec

#: block scales that are stored as element codes
SCALE_FORMATS = {"e4m3": E4M3, "ue5m3": UE5M3}


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """Codes and scales of one operand; value = code * block_scale * global_scale. docs/nvfp4.md, section 5.

    R is the other axis' extent, C the contraction axis', Cp is C rounded up to a multiple of 16 and of the
    transform.
    """

    #: uint8 [R, Cp / 2] (even element in the low nibble) or [R, Cp] for 8-bit elements; bf16 and fp32 hold
    #: the values
    codes: Tensor
    #: [ceil(R / r), ceil(Cp / c)] in the format's scale dtype, never replicated, never swizzled; [0, 0]
    #: without blocks
    block_scale: Tensor
    #: fp32 scalar; [R, Cp / outer block] for a format with several; 1 where a format has none
    global_scale: Tensor
    #: the axis of the original tensor that the GEMM sums over; for 0 the codes are stored transposed
    axis: int
    #: shape of the original tensor
    shape: tuple[int, int]
    spec: OperandSpec

    @property
    def contraction_size(self) -> int:
        """C, before padding."""
        return self.shape[self.axis]

    @property
    def rows(self) -> int:
        """R: extent of the axis that is not summed over."""
        return self.shape[1 - self.axis]

    def t(self) -> "QuantizedTensor":
        """The operand of the transposed tensor: bytes moved, none changed; same axis, shape reversed.

        Only square blocks mean the same in both directions. Raises ValueError for others, and after a
        transform.
        """
        size = self.spec.block_size
        if size is not None and size[0] != size[1]:
            raise ValueError(
                f"QuantizedTensor.t(): needs square blocks, got {size[0]}x{size[1]}. "
                "Quantize the other axis instead."
            )
        if self.spec.rht:
            raise ValueError(
                f"QuantizedTensor.t(): transformed along axis {self.axis}. Quantize the other axis instead."
            )
        codes = self.element_codes()[:, : self.contraction_size].t()
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 16)).contiguous()
        rows, blocks = codes.shape[0], codes.shape[1]
        scale = (
            self.block_scale.view(torch.uint8) if self.block_scale.element_size() == 1 else self.block_scale
        )
        if size is not None:
            scale = scale[:, : -(-rows // size[1])].t().contiguous()[:, : -(-blocks // size[1])]
        return replace(
            self,
            codes=pack_codes(codes, self.spec),
            block_scale=scale.view(self.block_scale.dtype),
            shape=(self.shape[1], self.shape[0]),
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values in the original shape; after a transform, the transformed tensor with Cp along the axis.

        fp32(fp32(code * block_scale) * global_scale), then dtype.
        """
        values = self.block_values()
        outer = self.spec.block_format.outer_block
        values = values * spread(self.global_scale, (1, outer) if outer else None, values.shape)
        if not self.spec.rht:
            values = values[:, : self.contraction_size]
        return (values.t() if self.axis == 0 else values).to(dtype)

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


@dataclass(frozen=True, slots=True)
class ExactOperand:
    """An operand whose values a GEMM can use as they are: value = values * scale, with values exact in BF16.

    Kept in the layout of the tensor it came from, so that neither orientation needs a transposing copy.
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
        outer = self.spec.block_format.outer_block
        if outer:
            return (1, outer)
        assert self.spec.block_size is not None, "a tensor without blocks has one scale"
        return self.spec.block_size

    def along(self, axis: int) -> "ExactOperand":
        """The same values summed over the other axis; square blocks without transform only."""
        if axis == self.axis:
            return self
        size = self.spec.block_size
        if self.spec.rht or (size is not None and size[0] != size[1]):
            raise ValueError(
                f"ExactOperand.along({axis}): blocks of {size} (rht {self.spec.rht}) only fit axis "
                f"{self.axis}."
            )
        return replace(self, axis=axis, scale=self.scale.t() if self.scale.dim() == 2 else self.scale)


def spread(scale: Tensor, block: tuple[int, int] | None, shape: tuple[int, ...]) -> Tensor:
    """Repeat a grid of scales over the elements it covers: [ceil(R / r), ceil(C / c)] -> [R, C]; a scalar
    stays one.
    """
    if scale.dim() == 0 or block is None:
        return scale
    rows = scale.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def decode_scales(block_scale: Tensor, block_format: BlockFormat) -> Tensor:
    """Stored block scales as fp32 of the same shape."""
    element = SCALE_FORMATS.get(block_format.scale or "")
    return (
        block_scale.to(torch.float32) if element is None else decode(block_scale.view(torch.uint8), element)
    )


def encode_scales(block_scale: Tensor, block_format: BlockFormat) -> Tensor:
    """fp32 block scales that lie on the format's grid, in its storage dtype. NaN becomes the format's NaN."""
    if block_format.scale == "e8m0":
        codes = (block_scale.view(torch.int32) >> 23) & 0xFF  # 2**-127 is subnormal and has code 0
        return codes.to(torch.uint8).view(torch.float8_e8m0fnu)
    element = SCALE_FORMATS.get(block_format.scale or "")
    if element is None:
        return block_scale
    codes = encode(block_scale, element)
    return codes if element.dtype is None else codes.view(element.dtype)


def pack_codes(codes: Tensor, spec: OperandSpec) -> Tensor:
    """Codes as stored: two to a byte where elements have 4 bits. codes: uint8 [R, Cp], contiguous."""
    element = spec.block_format.element
    return pack_nibbles(codes) if element is not None and element.bits == 4 else codes


def unpacked(q: QuantizedTensor) -> ExactOperand:
    """The exact form of a packed operand, rows first (axis 1)."""
    fmt = q.spec.block_format
    if fmt.element is None:
        return ExactOperand(q.codes, q.global_scale, 1, q.spec)
    if fmt.scale == "fp32":
        values = decode(q.element_codes(), fmt.element).to(torch.bfloat16)
        return ExactOperand(values, q.global_scale if q.spec.block_size is None else q.block_scale, 1, q.spec)
    return ExactOperand(q.block_values().to(torch.bfloat16), q.global_scale, 1, q.spec)
