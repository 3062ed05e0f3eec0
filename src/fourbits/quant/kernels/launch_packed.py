"""Launches that quantize a tensor to codes and scales, as checkpoints and FP4 tensor cores store them."""

import functools

import torch
from torch import Tensor

from fourbits.quant.kernels.allocate import allocator
from fourbits.quant.kernels.amax_pass import Amax, AmaxPass
from fourbits.quant.kernels.kernel_config import kernel_config
from fourbits.quant.kernels.launcher import Launcher
from fourbits.quant.kernels.packed_triton import packed_kernel
from fourbits.quant.kernels.tiles import Shape, group, packed_tile, programs, rounded_up
from fourbits.quant.request import OperandInputs, OperandRequest, Signature, StatsTarget
from fourbits.quant.scale_codes import SCALE_DTYPES
from fourbits.quant.tensor import QuantizedTensor

_NO_INPUTS = OperandInputs()


class PackedQuantizer:
    """Computes one packed operand for tensors of one signature."""

    def __init__(self, signature: Signature, requests: tuple[OperandRequest, ...]) -> None:
        (request,) = requests
        M, K = signature.shape
        self.device, self.spec, self.axis = signature.device, request.spec, request.axis
        self.empty = allocator(signature.device)
        self.config = config = kernel_config(request.spec, request.axis, packed=True)
        self.copies = signature.strides[1] != 1
        self.stride = K if self.copies else signature.strides[0]
        self.shape = Shape(M, K, signature.device.type == "cuda")
        self.rows, length = (M, K) if request.axis == 1 else (K, M)
        self.padded = length % group(config) != 0
        length = rounded_up(length, group(config))
        #: 4-bit codes are stored as words of eight, 8-bit codes as bytes
        self.width, self.dtype = (
            (length // 8, torch.int32) if config.element.bits == 4 else (length, torch.uint8)
        )
        block = (config.block_rows, config.block_columns)
        self.grid = -(-self.rows // block[1 - request.axis]), -(-length // block[request.axis])
        sides = (request, None) if request.axis == 1 else (None, request)
        configs = (config, None) if request.axis == 1 else (None, config)
        self.amaxes = AmaxPass(self.shape, self.stride, self.device, sides, configs)
        self.key_fields = request.key_fields
        self.launchers: dict[int, Launcher] = {}

    def __call__(
        self, x: Tensor, inputs: tuple[OperandInputs, ...], stats: StatsTarget | None = None
    ) -> tuple[QuantizedTensor]:
        """The packed operand of x; inputs: one entry."""
        assert stats is None, "packed operands have no amax policy"
        if self.copies:
            x = x.contiguous()
        codes = self.empty((self.rows, self.width), (self.width, 1), self.dtype)
        block_scale = self.empty(self.grid, (self.grid[1], 1), torch.uint8)
        global_scale = self.empty((), (), torch.float32)
        sides = (inputs[0], _NO_INPUTS) if self.axis == 1 else (_NO_INPUTS, inputs[0])
        amax = self.amaxes(x, *sides)[1 - self.axis]
        amax = amax or Amax(global_scale, 0, 1)
        parts = amax.count
        launcher = self.launchers.get(parts) or self._launcher(parts)
        counter = global_scale if inputs[0].counter is None else inputs[0].counter
        launcher(
            *(x, self.stride, self.shape.M, self.shape.K, codes, self.rows, self.width),
            *(block_scale, *self.grid, (amax.parts, amax.first), global_scale, counter, inputs[0].stream),
        )
        scale = block_scale.view(SCALE_DTYPES[self.spec.block_format.scale or ""])
        shape = (self.shape.M, self.shape.K)
        codes = codes.view(torch.uint8)
        return (QuantizedTensor(codes, scale, global_scale, self.axis, shape, self.spec),)

    def _launcher(self, parts: int) -> Launcher:
        tile, held = packed_tile(self.shape, self.config)
        launcher = self.launchers[parts] = Launcher(
            packed_kernel,
            (programs(self.shape, tile),),
            self.device,
            CONFIG=self.config,
            FIELDS=self.key_fields,
            PARTS=parts,
            E2M1X2=_converts(self.device) and self.config.element.max_value == 6.0,
            PADDED=self.padded,
            HELD=held,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            HARDWARE=self.shape.on_gpu,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )
        return launcher


@functools.cache
def _converts(device: torch.device) -> bool:
    """Whether the GPU converts to E2M1 in hardware."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)
