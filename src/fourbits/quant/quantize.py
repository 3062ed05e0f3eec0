"""The only entry point of quantization, and the only place that chooses an implementation.

Bits never depend on the choice. On NVIDIA GPUs fused Triton kernels quantize; on CPUs the reference, compiled
for larger tensors; elsewhere, and for specs without a kernel, the reference itself, and a warning says so.
docs/nvfp4.md, section 6.
"""

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourbits.operators import operator
from fourbits.quant.amax_stats import largest_magnitude, own_amax
from fourbits.quant.arguments import check_dtype, checked_inputs
from fourbits.quant.autocast import autocast_disabler, without_autocast
from fourbits.quant.cpu import quantize as cpu
from fourbits.quant.cpu.compiled import worth_compiling
from fourbits.quant.kernels.support import unsupported, unsupported_packed_spec, unsupported_spec
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference import quantize as reference
from fourbits.quant.reference.philox import computed_once
from fourbits.quant.request import OperandInputs, OperandRequest, Signature, StatsTarget, signature_of
from fourbits.quant.scale_codes import cast_bytes
from fourbits.quant.tensor import ExactOperand, Methods, QuantizedTensor, set_methods, unpacked
from fourbits.quant.tensor import dequantized as reference_dequantized
from fourbits.quant.tensor import transposed as reference_transposed
from fourbits.quant.traced import fake_fake_quantize, fake_packed, spec_from_text, spec_to_text
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.quant.kernels.launch_amaxes import OwnAmaxes, unsupported_amaxes
    from fourbits.quant.kernels.launch_dequantize import dequantized as kernel_dequantized
    from fourbits.quant.kernels.launch_dequantize import transposed as kernel_transposed
    from fourbits.quant.kernels.launch_dequantize import unsupported_dequantize, unsupported_transpose
    from fourbits.quant.kernels.launch_fake import FakeQuantizer, unsupported_fake
    from fourbits.quant.kernels.launch_unpack import unpacked as kernel_unpacked
    from fourbits.quant.kernels.launch_unpack import unsupported_unpack
    from fourbits.quant.kernels.quantizers import kernel_quantizer

Operand = ExactOperand | QuantizedTensor
Operands = tuple[Operand, ...]
Quantizer = Callable[[Tensor, tuple[OperandInputs, ...], StatsTarget | None], Operands]


def quantize(
    x: Tensor,
    spec: OperandSpec,
    axis: int = -1,
    amax: Tensor | None = None,
    sr_key: Tensor | None = None,
    coefficients: Tensor | None = None,
) -> QuantizedTensor:
    """Codes and scales of x as a GEMM operand.

    x: 2-D fp32, bf16 or fp16; axis: the contraction axis, 0 or 1 (or -1, -2); amax: fp32 scalar to use
    instead of the tensor's own (of the transformed tensor where spec.rht is set); sr_key: int64 [5] (seed,
    stream, step, first row, first 16-element block) or [2] (seed, step), required if random bits are drawn;
    coefficients: int8 [K, spec.error_feedback], `feedback_coefficients` of the weight that x is multiplied
    by, required with error feedback. Raises ValueError for other inputs.
    """
    if torch.compiler.is_compiling():
        return _traced(x, spec, axis, amax, sr_key, coefficients)
    operand = _one_operand(x, spec, axis, amax, sr_key, True, coefficients)
    assert isinstance(operand, QuantizedTensor)
    return operand


@operator(
    "quantize_packed(Tensor x, str spec, int axis, Tensor? amax, Tensor? sr_key, Tensor? coefficients=None) "
    "-> (Tensor, Tensor, Tensor)",
    fake_packed,
)
def quantize_packed(
    x: Tensor,
    spec: str,
    axis: int,
    amax: Tensor | None,
    sr_key: Tensor | None,
    coefficients: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and global scale of `quantize`, contiguous; E8M0 scales as uint8."""
    operand = quantize(x, spec_from_text(spec), axis, amax, sr_key, coefficients)
    codes, block_scale = operand.codes.contiguous(), operand.block_scale.contiguous()
    if block_scale.dtype == torch.float8_e8m0fnu:
        block_scale = block_scale.view(torch.uint8)
    # values that are stored as they are
    codes = codes.clone() if operand.spec.block_format.element is None else codes
    return codes, block_scale, operand.global_scale


def _traced(
    x: Tensor,
    spec: OperandSpec,
    axis: int,
    amax: Tensor | None,
    sr_key: Tensor | None,
    coefficients: Tensor | None,
) -> QuantizedTensor:
    """`quantize` in a graph, by the operator."""
    amax = None if amax is None else amax.detach()  # codes have no gradient, in a graph as eagerly
    given = (x.detach(), spec_to_text(spec), axis, amax, sr_key, coefficients)
    codes, block_scale, global_scale = quantize_packed(*given)
    if spec.block_format.scale == "e8m0":
        block_scale = cast_bytes(block_scale, torch.float8_e8m0fnu)
    return QuantizedTensor(codes, block_scale, global_scale, axis % 2, (x.shape[0], x.shape[1]), spec)


def exact_operand(
    x: Tensor,
    spec: OperandSpec,
    axis: int = -1,
    amax: Tensor | None = None,
    sr_key: Tensor | None = None,
    coefficients: Tensor | None = None,
) -> ExactOperand:
    """Values ready for a GEMM, equal to those of `quantize`'s codes and scales; arguments as there."""
    operand = _one_operand(x, spec, axis, amax, sr_key, False, coefficients)
    assert isinstance(operand, ExactOperand)
    return operand


@functools.lru_cache(maxsize=1 << 14)
def quantizer(signature: Signature, requests: tuple[OperandRequest, ...]) -> Quantizer:
    """The quantizer that computes these operands of tensors of one signature, in one pass if kernels can.

    requests: at most one operand of each axis. The quantizer takes (tensor, one OperandInputs per request,
    where to record the operands' stats or None). It is cached, and a call only launches.
    """
    check_dtype(signature.dtype)
    if unsupported(signature, requests) is None:
        return kernel_quantizer(signature, requests)
    if len(requests) == 1:
        return _WithoutKernels(signature, requests[0])
    return _Separately(tuple(quantizer(signature, (request,)) for request in requests))


def own_amaxes(x: Tensor, requests: tuple[OperandRequest, ...], inputs: tuple[OperandInputs, ...]) -> Tensor:
    """The amaxes of operands of one tensor, before they are quantized: fp32 [n]; 0 where none is used."""
    plan = None if _skips_kernels(x) else _amax_plan(signature_of(x), requests)
    if plan is not None:
        return plan(x, inputs)
    found: list[Tensor] = []
    for request, given in zip(requests, inputs, strict=True):
        key = _key_of(request, given) if request.draws else None
        with without_autocast(x):
            found.append(largest_magnitude(x, request.spec, request.axis, key))
    return torch.stack(found)


@functools.lru_cache(maxsize=1 << 12)
def _amax_plan(signature: Signature, requests: tuple[OperandRequest, ...]) -> "OwnAmaxes | None":
    """A plan that finds the amaxes in one pass, or None where no kernel does."""
    own = tuple(request._replace(packed=False, amax="own") for request in requests)
    return OwnAmaxes(signature, own) if unsupported_amaxes(signature, own) is None else None


def one_pass(signature: Signature, requests: tuple[OperandRequest, ...]) -> bool:
    """Whether kernels compute all these operands in one pass over the tensor."""
    return unsupported(signature, requests) is None


def unsupported_operand(spec: OperandSpec) -> str | None:
    """Why no kernel computes operands of this spec on a GPU, or None."""
    return unsupported_spec(spec.of_residual)


def unsupported_packed_operand(spec: OperandSpec) -> str | None:
    """Why no kernel reads packed operands of this spec on a GPU, or None."""
    return unsupported_packed_spec(spec)


def exact(q: QuantizedTensor) -> ExactOperand:
    """The exact form of a packed operand."""
    if q.codes.device.type in ("cpu", "meta") and not HAS_TRITON:
        return unpacked(q)
    reason = unsupported_unpack(q)
    if reason is None:
        return kernel_unpacked(q)
    if q.codes.is_cuda and q.spec.block_format.quantized:
        _warn_of_reference(f"packed {q.spec.format}", reason)
    return unpacked(q)


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of a packed operand; what `QuantizedTensor.dequantize` calls."""
    if _skips_kernels(q.codes) or unsupported_dequantize(q, dtype) is not None:
        with without_autocast(q.codes):
            return reference_dequantized(q, dtype)
    return kernel_dequantized(q, dtype)


def transposed(q: QuantizedTensor) -> QuantizedTensor:
    """The operand of the transposed tensor; what `QuantizedTensor.t` calls."""
    if _skips_kernels(q.codes) or unsupported_transpose(q) is not None:
        with without_autocast(q.codes):
            return reference_transposed(q)
    return kernel_transposed(q)


set_methods(Methods(dequantize, transposed))


@operator(
    "fake_quantize(Tensor x, str spec, int axis, Tensor? amax, Tensor? sr_key) -> Tensor",
    fake_fake_quantize,
    gradients=lambda _ctx, grad: (grad, None, None, None, None),
)
def fake_quantized(x: Tensor, spec: str, axis: int, amax: Tensor | None, sr_key: Tensor | None) -> Tensor:
    """`quantized_and_back` in a graph, contiguous, with the gradient of the identity."""
    return quantized_and_back(x, spec_from_text(spec), axis, amax, sr_key).contiguous()


def quantized_and_back(
    x: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None, sr_key: Tensor | None
) -> Tensor:
    """x quantized by `quantize` and dequantized to its dtype; arguments as there, without a transform."""
    axis, amax, key = checked_inputs(x, spec, axis, amax, sr_key)
    if not _skips_kernels(x):
        request = OperandRequest(spec, axis, False, "own" if amax is None else "given")
        fake_quantizer = _fake_quantizer(signature_of(x), request)
        if fake_quantizer is not None:
            return fake_quantizer(x, OperandInputs(key, 0, amax))
    return dequantize(quantize(x, spec, axis, amax, key), x.dtype)


@functools.lru_cache(maxsize=1 << 12)
def _fake_quantizer(signature: Signature, request: OperandRequest) -> "FakeQuantizer | None":
    """The kernel that quantizes and dequantizes in one pass, or None if there is none."""
    return FakeQuantizer(signature, request) if unsupported_fake(signature, request) is None else None


def _skips_kernels(x: Tensor) -> bool:
    """Whether no kernel may run: without Triton, or where a compiler traces the reference into its graph."""
    return not HAS_TRITON or x.device.type == "meta" or torch.compiler.is_compiling()


def _one_operand(
    x: Tensor,
    spec: OperandSpec,
    axis: int,
    amax: Tensor | None,
    sr_key: Tensor | None,
    packed: bool,
    coefficients: Tensor | None,
) -> Operand:
    axis, amax, key = checked_inputs(x, spec, axis, amax, sr_key, coefficients)
    if torch.compiler.is_compiling():  # the compiler traces the reference into its caller's graph
        amax = None if amax is None else amax.reshape(()).abs()
        with without_autocast(x):
            make = reference.quantize if packed else reference.exact_operand
            return make(x, spec, axis, amax, key, coefficients)
    request = OperandRequest(spec, axis, packed, "own" if amax is None else "given")
    given = OperandInputs(key, 0, amax, coefficients=coefficients)
    (operand,) = quantizer(signature_of(x), (request,))(x, (given,), None)
    return operand


class _Separately:
    """Operands that are quantized in separate passes."""

    def __init__(self, parts: tuple[Quantizer, ...]) -> None:
        self._parts = parts

    def __call__(
        self, x: Tensor, inputs: tuple[OperandInputs, ...], stats: StatsTarget | None
    ) -> tuple[Operand, ...]:
        found: list[Operand] = []
        for i, part in enumerate(self._parts):
            target = None if stats is None else stats._replace(places=(stats.places[i],))
            found += part(x, (inputs[i],), target)
        return tuple(found)


class _WithoutKernels:
    """One operand by the reference, compiled on a CPU where the tensor is worth it."""

    def __init__(self, signature: Signature, request: OperandRequest) -> None:
        self._request, self._draws = request, request.draws
        self._no_autocast = autocast_disabler(signature.device)
        if signature.device.type not in ("cpu", "meta") and request.spec.block_format.quantized:
            _warn_of_reference(request.spec.format, unsupported(signature, (request,)) or "")

    def __call__(
        self, x: Tensor, inputs: tuple[OperandInputs, ...], stats: StatsTarget | None
    ) -> tuple[Operand, ...]:
        request, key = self._request, _key_of(self._request, inputs[0]) if self._draws else None
        amax, factor = inputs[0].amax, inputs[0].factor
        x = x.detach()  # an operand in high precision is x itself, and must not keep its autograd graph
        with torch.no_grad(), self._no_autocast():
            if factor is not None:
                x = x.to(torch.float32) * factor
            if request.amax == "stored":
                assert amax is not None
                amax, own, counts = own_amax(x, request.spec, request.axis, amax, key)
                if stats is not None:
                    stats.own_amax[stats.places[0]] = own
                    stats.counts[stats.places[0], :2] = counts
            elif amax is not None:
                amax = amax.amax().abs()
            if request.spec.error_feedback:  # a span's blocks depend on each other
                make = reference.quantize if request.packed else reference.exact_operand
                return (make(x, request.spec, request.axis, amax, key, inputs[0].coefficients),)
            implementation = cpu if worth_compiling(x) else reference
            make = implementation.quantize if request.packed else implementation.exact_operand
            return (make(x, request.spec, request.axis, amax, key),)


def _key_of(request: OperandRequest, inputs: OperandInputs) -> Tensor | None:
    """(seed, stream, step, first row, first block) of an operand's random bits, int64 [5]; None without."""
    if inputs.counter is None:
        return None
    fields, stream = _key_parts(request.key_fields, inputs.stream, inputs.counter.device)
    return inputs.counter[fields] + stream


@computed_once
def _key_parts(fields: tuple[int, ...], stream: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The entries of a counter that form an operand's key, and what is added to them."""
    return torch.tensor(fields, device=device, dtype=torch.int64), torch.tensor(
        [0, stream, 0, 0, 0], device=device, dtype=torch.int64
    )


@functools.cache
def _warn_of_reference(what: str, reason: str) -> None:
    warnings.warn(
        f"fourbits: the eager reference quantizes {what} on this device, many times slower, same bits "
        f"({reason}).",
        stacklevel=4,
    )
