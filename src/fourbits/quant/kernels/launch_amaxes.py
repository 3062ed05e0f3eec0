"""The launch that finds the amaxes of a tensor's operands before they are quantized."""

from torch import Tensor

from fourbits.quant.kernels.amax_pass import AmaxPass
from fourbits.quant.kernels.kernel_config import FP8_FORMATS
from fourbits.quant.kernels.launch_exact import sides_of
from fourbits.quant.kernels.support import rotates, transposes, unsupported
from fourbits.quant.kernels.tiles import Shape
from fourbits.quant.request import OperandInputs, OperandRequest, Signature

_NO_INPUTS = OperandInputs()


def unsupported_amaxes(signature: Signature, requests: tuple[OperandRequest, ...]) -> str | None:
    """Why no kernel finds the amaxes of these operands in one pass, or None."""
    if reason := unsupported(signature, requests):
        return reason
    for request in requests:
        if request.spec.format in FP8_FORMATS or rotates(request) or transposes(request):
            return "FP8, MS-EDEN and transforms along axis 1 have amax passes of their own"
        if not request.spec.tensor_scaled:
            return "an operand without a global scale has no amax"
    return None


class OwnAmaxes:
    """Amaxes of the operands of tensors of one signature, at most one along each axis."""

    def __init__(self, signature: Signature, requests: tuple[OperandRequest, ...]) -> None:
        """requests: supported ones, with amax `own`."""
        M, K = signature.shape
        self._copies = signature.strides[1] != 1
        stride = K if self._copies else signature.strides[0]
        row, column = sides_of(requests)
        self._places, self._count = (row.place, column.place), len(requests)
        self._pass = AmaxPass(
            Shape(M, K, signature.device.type == "cuda"),
            stride,
            signature.device,
            (row.request, column.request),
            (row.config, column.config),
        )

    def __call__(self, x: Tensor, inputs: tuple[OperandInputs, ...]) -> Tensor:
        """fp32 [n], in the order of the requests. inputs: their random streams; given amaxes are ignored."""
        if self._copies:
            x = x.contiguous()
        row, column = (_NO_INPUTS if p < 0 else inputs[p]._replace(amax=None) for p in self._places)
        found = [amax for amax in self._pass(x, row, column) if amax is not None]
        amaxes = found[0].parts.view(self._count, -1).amax(1)  # of the row first
        return amaxes.flip(0) if self._places == (1, 0) else amaxes
