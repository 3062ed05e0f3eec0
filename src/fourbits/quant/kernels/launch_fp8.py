"""The launch that quantizes a tensor to FP8 in blocks of 128: row operand, column operand or both."""

import torch
from torch import Tensor

from fourbits.quant.kernels.allocate import allocator
from fourbits.quant.kernels.fp8_triton import fp8_kernel
from fourbits.quant.kernels.kernel_config import fp8_config
from fourbits.quant.kernels.launcher import Launcher
from fourbits.quant.kernels.support import has_fp8
from fourbits.quant.kernels.tiles import rounded_up
from fourbits.quant.request import OperandInputs, OperandRequest, Signature, StatsTarget
from fourbits.quant.tensor import ExactOperand, QuantizedTensor

_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}
_BLOCK = 128
#: rows of a tile that a program processes at a time, and its warps
_ROWS, _WARPS = 64, 4


class Fp8Quantizer:
    """FP8 operands of tensors of one signature: packed, or exact as views of the same bytes."""

    def __init__(self, signature: Signature, requests: tuple[OperandRequest, ...]) -> None:
        self.M, self.K = signature.shape
        self.device, self.requests, self.empty = signature.device, requests, allocator(signature.device)
        self.copies = signature.strides[1] != 1
        self.stride = self.K if self.copies else signature.strides[0]
        by_axis = {request.axis: fp8_config(request.spec) for request in requests}
        self.row, self.column = by_axis.get(1), by_axis.get(0)
        tiles = -(-self.M // _BLOCK) * -(-self.K // _BLOCK)
        self.launch = None if not tiles else Launcher(
            fp8_kernel,
            (tiles,),
            self.device,
            ROW=self.row,
            ROW_PADDED=self.K % 16 != 0,
            COLUMN=self.column,
            COLUMN_PADDED=self.M % 16 != 0,
            ROWS=_ROWS,
            CONVERTS=has_fp8(self.device),
            HARDWARE=signature.device.type == "cuda",
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip

    def __call__(
        self, x: Tensor, inputs: tuple[OperandInputs, ...], stats: StatsTarget | None = None
    ) -> tuple[ExactOperand | QuantizedTensor, ...]:
        """The operands, in the order of the requests."""
        assert stats is None, "FP8 operands in blocks have no amax policy"
        if self.copies:
            x = x.contiguous()
        row, column = self._outputs(1), self._outputs(0)
        if self.launch is not None:
            sides = [
                (codes, codes.stride(0), scales, scales.stride(0), scales.stride(1))
                for codes, scales in (row, column)
            ]
            self.launch(x, self.stride, self.M, self.K, *sides[0], *sides[1])
        return tuple(self._operand(r, *(row if r.axis == 1 else column)) for r in self.requests)

    def _outputs(self, axis: int) -> tuple[Tensor, Tensor]:
        """Codes in words of four, and fp32 block scales; empty for an axis without an operand."""
        config = self.row if axis == 1 else self.column
        rows, length = (self.M, self.K) if axis == 1 else (self.K, self.M)
        shape = (0, 0) if config is None else (rows, rounded_up(length, 16))
        codes = self.empty((shape[0], shape[1] // 4), (shape[1] // 4, 1), torch.int32)
        across = -(-shape[1] // _BLOCK)
        if config is not None and config.square:
            return codes, self.empty((-(-rows // _BLOCK), across), (across, 1), torch.float32)
        # GEMMs read the scales of many rows together
        return codes, self.empty((shape[0], across), (1, shape[0]), torch.float32)

    def _operand(
        self, request: OperandRequest, codes: Tensor, scales: Tensor
    ) -> ExactOperand | QuantizedTensor:
        spec, axis, codes = request.spec, request.axis, codes.view(torch.uint8)
        if request.packed:
            one = torch.ones((), dtype=torch.float32, device=self.device)
            return QuantizedTensor(codes, scales, one, axis, (self.M, self.K), spec)
        values = codes.view(_DTYPES[spec.format])
        if axis == 1:
            return ExactOperand(values, scales, 1, spec)
        return ExactOperand(values.t(), scales.t(), 0, spec)
