"""Chooses the launches for a request: the only entry to the quantizing kernels."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from fourbits.quant.kernels.kernel_config import FP8_FORMATS
from fourbits.quant.kernels.launch_error_feedback import FeedbackQuantizer
from fourbits.quant.kernels.launch_exact import ExactQuantizer
from fourbits.quant.kernels.launch_fp8 import Fp8Quantizer
from fourbits.quant.kernels.launch_packed import PackedQuantizer
from fourbits.quant.kernels.launch_rotation import RotationQuantizer
from fourbits.quant.kernels.support import rotates, transposes
from fourbits.quant.request import OperandInputs, OperandRequest, Signature, StatsTarget
from fourbits.quant.tensor import ExactOperand, QuantizedTensor

Operands = tuple[ExactOperand | QuantizedTensor, ...]
Quantizer = Callable[[Tensor, tuple[OperandInputs, ...], StatsTarget | None], Operands]


def kernel_quantizer(signature: Signature, requests: tuple[OperandRequest, ...]) -> Quantizer:
    """The quantizer that computes the requested operands, which the kernels support in one pass."""
    if requests[0].spec.format in FP8_FORMATS:
        return Fp8Quantizer(signature, requests)
    if requests[0].spec.error_feedback:
        return FeedbackQuantizer(signature, requests[0])
    if rotates(requests[0]):
        return RotationQuantizer(signature, requests[0])
    if transposes(requests[0]):
        return _Transposing(signature, requests[0])
    if len(requests) == 1 and requests[0].packed:
        return PackedQuantizer(signature, requests)
    return ExactQuantizer(signature, requests)


class _Transposing:
    """Computes an operand with a transform along axis 1 as a column operand of the transposed tensor."""

    def __init__(self, signature: Signature, request: OperandRequest) -> None:
        rows, columns = signature.shape
        transposed = signature._replace(shape=(columns, rows), strides=(rows, 1))
        self._inner = kernel_quantizer(transposed, (request._replace(axis=0),))

    def __call__(
        self, x: Tensor, inputs: tuple[OperandInputs, ...], stats: StatsTarget | None = None
    ) -> Operands:
        (operand,) = self._inner(x.t().contiguous(), inputs, stats)
        if isinstance(operand, ExactOperand):
            return (replace(operand, values=operand.values.t(), axis=1),)
        return (replace(operand, axis=1, shape=(operand.shape[1], operand.shape[0])),)
