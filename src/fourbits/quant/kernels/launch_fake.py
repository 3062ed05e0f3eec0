"""Launches that quantize and dequantize a tensor in a single pass, without storing codes."""

import torch
from torch import Tensor

from fourbits.quant.kernels.amax_pass import Amax, AmaxPass
from fourbits.quant.kernels.exact_triton import operands_kernel
from fourbits.quant.kernels.kernel_config import FP8_FORMATS, kernel_config
from fourbits.quant.kernels.launcher import Launcher
from fourbits.quant.kernels.support import unsupported
from fourbits.quant.kernels.tiles import Shape, exact_tile, programs
from fourbits.quant.request import OperandInputs, OperandRequest, Signature

_NO_INPUTS = OperandInputs()


def unsupported_fake(signature: Signature, request: OperandRequest) -> str | None:
    """Why no kernel quantizes and dequantizes in one pass, or None."""
    if request.spec.format in FP8_FORMATS:
        return "FP8 blocks have no kernel that dequantizes"
    if request.spec.rht:
        return "a transformed tensor has another shape"
    return unsupported(signature, (request,))


class FakeQuantizer:
    """Quantizes and dequantizes tensors of one signature, in their dtype, in one pass."""

    def __init__(self, signature: Signature, request: OperandRequest) -> None:
        M, K = signature.shape
        self.device, self.dtype, self.axis = signature.device, signature.dtype, request.axis
        self.copies = signature.strides[1] != 1
        self.stride = K if self.copies else signature.strides[0]
        self.shape = Shape(M, K, signature.device.type == "cuda")
        self.config, self.fields = kernel_config(request.spec, request.axis), request.key_fields
        self.sides = (self.config, None) if request.axis == 1 else (None, self.config)
        requests = (request, None) if request.axis == 1 else (None, request)
        self.amaxes = AmaxPass(self.shape, self.stride, self.device, requests, self.sides)
        self.launchers: dict[int, Launcher] = {}

    def __call__(self, x: Tensor, inputs: OperandInputs) -> Tensor:
        """Values of x, contiguous."""
        if self.copies:
            x = x.contiguous()
        M, K = self.shape.M, self.shape.K
        out = torch.empty((M, K), dtype=self.dtype, device=self.device)
        scale = torch.empty((), dtype=torch.float32, device=self.device)
        sides = (inputs, _NO_INPUTS) if self.axis == 1 else (_NO_INPUTS, inputs)
        amax = self.amaxes(x, *sides)[1 - self.axis] or Amax(scale, 0, 1)
        launcher = self.launchers.get(amax.count) or self._launcher(amax.count)
        parts, key = (amax.parts, amax.first), scale if inputs.counter is None else inputs.counter
        launcher(
            *(x, self.stride, M, K, scale),
            *(out, K, K, parts, key, inputs.stream),
            *(out, K, scale, M, parts, key, inputs.stream),
            *(scale, scale, scale, scale),
        )
        return out

    def _launcher(self, parts: int) -> Launcher:
        tile = exact_tile(self.shape, *self.sides)
        launcher = self.launchers[parts] = Launcher(
            operands_kernel,
            (programs(self.shape, tile),),
            self.device,
            ROW=self.sides[0],
            ROW_FIELDS=self.fields,
            ROW_PARTS=parts,
            COLUMN=self.sides[1],
            COLUMN_FIELDS=self.fields,
            COLUMN_PARTS=parts,
            COLUMN_PACKED=False,
            COLUMN_VECTOR=tile.vector,
            ROW_HELD=tile.held,
            COLUMN_HELD=tile.column_held,
            OBSERVE=False,
            SCALED=False,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            HARDWARE=self.shape.on_gpu,
            DEQUANTIZED=True,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )
        return launcher
