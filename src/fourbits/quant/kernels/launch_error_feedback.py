"""Launches that quantize a tensor with error feedback to an exact row operand."""

from typing import Any

import torch
from torch import Tensor

from fourbits.quant.feedback_coefficients import GROUP, SHORT, span_within
from fourbits.quant.kernels.allocate import allocator
from fourbits.quant.kernels.amax_pass import Amax, AmaxPass
from fourbits.quant.kernels.error_feedback_groups_triton import feedback_groups_kernel
from fourbits.quant.kernels.error_feedback_triton import feedback_kernel
from fourbits.quant.kernels.kernel_config import kernel_config
from fourbits.quant.kernels.launcher import Launcher
from fourbits.quant.kernels.tiles import Shape, Tile, programs, rounded_up
from fourbits.quant.request import OperandInputs, OperandRequest, Signature, StatsTarget
from fourbits.quant.tensor import ExactOperand

_NO_INPUTS = OperandInputs()
#: rows and warps of a program, measured on an H200 (docs/benchmarks.md)
_ROWS, _WARPS = 32, 2
#: the same for spans of several groups
_GROUPS_ROWS, _GROUPS_WARPS = 64, 4
#: loads that are under way while a group's errors are multiplied
_STAGES = 4
#: registers of a thread there, so that four programs share an SM; a scale search needs more
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
        #: groups of all spans, whose errors are kept while a row is quantized; 0 where registers hold them
        self.groups = rounded_up(max(K, 1), self.span) // self.span * -(-self.span // GROUP)
        self.groups *= self.span > SHORT
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
        launcher(
            *(x, self.stride, self.shape.M, self.shape.K, self._in_order(given.coefficients)),
            *(values, self.width, self.width, (amax.parts, amax.first), scale),
            *self._memory(),
        )
        return (ExactOperand(values, scale, 1, self.spec),)

    def _in_order(self, coefficients: Tensor) -> Tensor:
        """Coefficients in the order of the kernel; a copy only of those that do not come `in_order`."""
        return (coefficients.t() if self.groups else coefficients).contiguous()

    def _memory(self) -> tuple[Tensor | int, ...]:
        """The memory of the kernel of groups: errors and their units."""
        if not self.groups:
            return ()
        height = rounded_up(self.shape.M, _GROUPS_ROWS)
        errors = self.empty((self.groups, height, GROUP), (height * GROUP, GROUP, 1), torch.int8)
        return errors, self.empty((self.groups, height), (height, 1), torch.float32), height

    def _launcher(self, parts: int) -> Launcher:
        rows, warps = (_GROUPS_ROWS, _GROUPS_WARPS) if self.groups else (_ROWS, _WARPS)
        tile = Tile(rows, self.span, warps)
        of_groups: dict[str, Any] = {"STAGES": _STAGES} if self.groups else {}
        if self.groups and self.shape.on_gpu and not self.config.metric:
            of_groups["maxnreg"] = _REGISTERS
        launcher = self.launchers[parts] = Launcher(
            feedback_groups_kernel if self.groups else feedback_kernel,
            (programs(self.shape, tile),),
            self.device,
            CONFIG=self.config,
            PARTS=parts,
            SPAN=self.span,
            ROWS=tile.rows,
            HARDWARE=self.shape.on_gpu,
            num_warps=tile.warps,
            num_stages=1,
            enable_fp_fusion=False,
            **of_groups,
        )
        return launcher
