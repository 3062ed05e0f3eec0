"""Launches that compute one exact operand by MS-EDEN: the first transforms, the second quantizes."""

import torch
from torch import Tensor

from fourbits.quant.kernels.allocate import allocator
from fourbits.quant.kernels.amax_pass import Amax
from fourbits.quant.kernels.kernel_config import kernel_config
from fourbits.quant.kernels.launcher import Launcher
from fourbits.quant.kernels.rotate_triton import rotate_kernel
from fourbits.quant.kernels.rotation_triton import rotation_kernel
from fourbits.quant.kernels.tiles import TWELVE_WARPS, rounded_up
from fourbits.quant.request import OperandInputs, OperandRequest, Signature, StatsTarget
from fourbits.quant.tensor import ExactOperand

#: lanes of a program's tile, and warps: of the transform, a lane to a thread; of the quantizer, two threads
_ROTATED, _ROTATED_WARPS, _QUANTIZED = 64, 2, 16
#: programs of the transform, each of which writes a partial maximum
_PROGRAMS = 512


class RotationQuantizer:
    """Computes one exact operand by MS-EDEN for tensors of one signature, with the contraction along rows."""

    def __init__(self, signature: Signature, request: OperandRequest) -> None:
        M, K = signature.shape
        self.spec, self.axis, self.empty = request.spec, request.axis, allocator(signature.device)
        self.copies = signature.strides[1] != 1
        self.shape = K if self.copies else signature.strides[0], M, K
        # The contraction runs down a tile's rows, whichever axis of the tensor it is.
        self.config = kernel_config(request.spec, 0)
        assert self.config.transform is not None
        size = self.config.transform.size
        self.lanes, length = (M, K) if request.axis == 1 else (K, M)
        self.length = rounded_up(length, size)
        rotations, on_gpu = self.length // size, signature.device.type == "cuda"
        self.programs = _PROGRAMS if on_gpu else 2
        self.device, self.on_gpu = signature.device, on_gpu
        self.fields = request.key_fields
        self.rotate = Launcher(
            rotate_kernel,
            (self.programs,),
            signature.device,
            CONFIG=self.config,
            AXIS=request.axis,
            FIELDS=request.key_fields,
            SCALED=signature.scaled,
            LANES=_ROTATED,
            HARDWARE=on_gpu,
            num_warps=_ROTATED_WARPS,
            enable_fp_fusion=False,
        )
        self.tiles = max(1, rotations * -(-self.lanes // _QUANTIZED))
        #: launchers of the quantizer by the number of partial maxima of the amax
        self.launchers: dict[int, Launcher] = {}

    def __call__(
        self, x: Tensor, inputs: tuple[OperandInputs, ...], stats: StatsTarget | None = None
    ) -> tuple[ExactOperand]:
        """The exact operand of x; inputs: one entry."""
        assert stats is None, "operands with an amax policy have a separate kernel"
        if self.copies:
            x = x.contiguous()
        (given,) = inputs
        layout = (self.lanes, self.length), (self.length, 1), torch.bfloat16
        rotated, values, scale = self.empty(*layout), self.empty(*layout), self.empty((), (), torch.float32)
        parts = self.empty((self.programs,), (1,), torch.float32)
        counter = scale if given.counter is None else given.counter
        self.rotate(
            *(x, *self.shape, scale if given.factor is None else given.factor),
            *(rotated, self.length, self.lanes, parts, counter, given.stream),
        )
        amax = Amax(parts, 0, self.programs)
        if given.amax is not None:
            amax = Amax(given.amax, 0, given.amax.numel())
        launcher = self.launchers.get(amax.count) or self._launcher(amax.count)
        launcher(rotated, self.length, self.lanes, values, amax.parts, scale, counter, given.stream)
        return (ExactOperand(values if self.axis == 1 else values.t(), scale, self.axis, self.spec),)

    def _launcher(self, parts: int) -> Launcher:
        launcher = self.launchers[parts] = Launcher(
            rotation_kernel,
            (self.tiles,),
            self.device,
            CONFIG=self.config,
            FIELDS=self.fields,
            PARTS=parts,
            LANES=_QUANTIZED,
            HARDWARE=self.on_gpu,
            num_warps=1,
            maxnreg=TWELVE_WARPS,
            enable_fp_fusion=False,
        )
        return launcher
