"""Launches that quantize a tensor with error feedback to an exact row operand."""

from typing import Any

import torch
from torch import Tensor

from fourbits.quant.feedback_coefficients import GROUP, span_within
from fourbits.quant.kernels.allocate import allocator
from fourbits.quant.kernels.amax_pass import Amax, AmaxPass
from fourbits.quant.kernels.error_feedback_triton import feedback_kernel
from fourbits.quant.kernels.kernel_config import kernel_config
from fourbits.quant.kernels.launcher import Launcher
from fourbits.quant.kernels.tiles import Shape, Tile, programs, rounded_up
from fourbits.quant.request import OperandInputs, OperandRequest, Signature, StatsTarget
from fourbits.quant.tensor import ExactOperand

_NO_INPUTS = OperandInputs()
#: rows and warps of a program, measured on an H200 (docs/log.md)
_ROWS, _WARPS = 64, 4
#: loads that are under way while a group's errors are multiplied
_STAGES = 4
#: registers of a thread, so that four programs share an SM; a scale search needs more
_REGISTERS = 128


class FeedbackQuantizer:
    """The exact operand along axis 1 of tensors of one signature, with error feedback."""

    def __init__(self, signature: Signature, request: OperandRequest) -> None:
        M, K = signature.shape
        self.empty = allocator(signature.device)
        self.copies = signature.strides[1] != 1
        self.stride = K if self.copies else signature.strides[0]
        self.shape, self.device = Shape(M, K, signature.device.type == "cuda"), signature.device
        self.spec, self.width = request.spec, rounded_up(K, 16)
        self.span = span_within(request.spec.error_feedback, K)
        #: groups of all spans, whose errors are kept while a row is quantized
        self.groups = rounded_up(max(K, 1), self.span) // self.span * -(-self.span // GROUP)
        self.height = rounded_up(max(M, 1), _ROWS)
        self.config = kernel_config(request.spec, 1)
        sides, configs = (request, None), (self.config, None)
        self.amaxes = AmaxPass(self.shape, self.stride, self.device, sides, configs)
        #: launchers by how many partial maxima the amax has
        self.launchers: dict[int, Launcher] = {}

    def __call__(
        self, x: Tensor, inputs: tuple[OperandInputs, ...], stats: StatsTarget | None = None
    ) -> tuple[ExactOperand]:
        """The operand of x; inputs: one entry, with coefficients."""
        assert stats is None, "operands with error feedback have no amax policy"
        (given,) = inputs
        assert given.coefficients is not None, "the caller passes coefficients"
        if self.copies:
            x = x.contiguous()
        values = self.empty((self.shape.M, self.width), (self.width, 1), torch.bfloat16)
        scale = self.empty((), (), torch.float32)
        amax = self.amaxes(x, given, _NO_INPUTS)[0] or Amax(scale, 0, 1)
        launcher = self.launchers.get(amax.count) or self._launcher(amax.count)
        # a copy only of coefficients that do not come `in_order`
        coefficients, height = given.coefficients.t().contiguous(), self.height
        errors = self.empty((self.groups, height, GROUP), (height * GROUP, GROUP, 1), torch.int8)
        launcher(
            *(x, self.stride, self.shape.M, self.shape.K, coefficients),
            *(values, self.width, self.width, (amax.parts, amax.first), scale, errors, height),
        )
        return (ExactOperand(values, scale, 1, self.spec),)

    def _launcher(self, parts: int) -> Launcher:
        tile = Tile(_ROWS, self.span, _WARPS)
        limited = self.shape.on_gpu and not self.config.metric
        options: dict[str, Any] = {"maxnreg": _REGISTERS} if limited else {}
        launcher = self.launchers[parts] = Launcher(
            feedback_kernel,
            (programs(self.shape, tile),),
            self.device,
            CONFIG=self.config,
            PARTS=parts,
            SPAN=self.span,
            ROWS=_ROWS,
            STAGES=_STAGES,
            HARDWARE=self.shape.on_gpu,
            num_warps=_WARPS,
            num_stages=1,
            enable_fp_fusion=False,
            **options,
        )
        return launcher
