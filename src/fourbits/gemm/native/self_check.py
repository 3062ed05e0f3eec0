"""The self-check of a GPU's arithmetic, which the native backend must pass before it trains.

Other stacks have silently trained on all-zero gradients on new GPUs. So the self-check tests the user's GPU:
quantizer bytes equal the reference's, GEMMs stay within the error bound of docs/nvfp4.md, section 12.4, and
stochastic rounding rounds up with the specified probability. Whose sums the GEMM's are is reported beside.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.gemm.native import matmul as matmul_native
from fourbits.gemm.native.sums_check import examine_sums
from fourbits.gemm.reference import matmul as matmul_reference
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.quant.tensor import QuantizedTensor

Product = Callable[[QuantizedTensor, QuantizedTensor, torch.dtype, Tensor | None], Tensor]

#: the GEMM of FP4 tensor cores
NATIVE: Product = matmul_native.matmul
_ROW = OperandSpec()
_GRADIENT = OperandSpec(rounding="sr")
_BLOCK_2D = OperandSpec(block=(16, 16), source="bf16")
_COLUMN, _GRADIENT_COLUMN = OperandSpec(rht=16), OperandSpec(rounding="sr", rht=16)
#: the operands of the three GEMMs of the nvfp4 recipe: (lhs, its axis, rhs, its axis)
_GEMMS = {
    "fprop": (_ROW, 1, _BLOCK_2D, 1),
    "dgrad": (_GRADIENT, 1, _BLOCK_2D, 0),
    "wgrad": (_GRADIENT_COLUMN, 0, _COLUMN, 0),
}
#: M, N and K of the GEMMs: more than one tile, with remainders; small enough for the uncompiled reference
_SHAPE = (272, 144, 240)
_SIGMAS = 5.0


class Finding(NamedTuple):
    """The result of one check."""

    what: str
    passed: bool
    detail: str


def check_native(device: torch.device, multiply: Product = NATIVE) -> tuple[Finding, ...]:
    """All findings of the self-check on a device. A check that raises an error has not passed."""
    return tuple(found for check in checks(device, multiply).values() for found in check())


def checks(device: torch.device, multiply: Product = NATIVE) -> dict[str, Callable[[], tuple[Finding, ...]]]:
    """The parts of the self-check by name. None needs another, so they may run in parallel."""
    parts: dict[str, Callable[[], list[Finding]]] = {
        name: functools.partial(_gemm_findings, name, device, multiply) for name in _GEMMS
    }
    parts["stochastic rounding"] = functools.partial(_rounding_findings, device)
    parts["sums"] = functools.partial(_sums_findings, device, multiply)
    return {name: functools.partial(_findings_or_error, name, part) for name, part in parts.items()}


@functools.cache
def unsupported_arithmetic(device: torch.device) -> str | None:
    """Why a device failed the self-check, or None if it passed. Runs once per process."""
    wrong = [f"{found.what} ({found.detail})" for found in check_native(device) if not found.passed]
    return "; ".join(wrong) or None


def share_of_bound(
    out: Tensor,
    a: QuantizedTensor,
    b: QuantizedTensor,
    bias: Tensor | None = None,
    sum_error: float | None = None,
) -> float:
    """Largest error of a GEMM of a and b, relative to the bound of section 12.4: correct if <= 1 and not NaN.

    sum_error: error bound of a sum relative to the sum of its terms' magnitudes; default: that of FP32.
    """
    true = matmul_reference.matmul(a, b, torch.float32, bias).double()
    values = [(q.block_values() * q.global_scale).double() for q in (a, b)]
    magnitude = values[0].abs() @ values[1].abs().t()
    last_bit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[out.dtype]
    if sum_error is None:
        sum_error = values[0].shape[1] * 2.0**-23
    allowed = sum_error * (magnitude + true.abs()) + last_bit * true.abs()
    return float(((out.double() - true).abs() / allowed.clamp_min(torch.finfo(torch.float32).tiny)).max())


def _findings_or_error(what: str, check: Callable[[], list[Finding]]) -> tuple[Finding, ...]:
    """The findings of a check, or the error that it raised."""
    try:
        return tuple(check())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - libraries and compilers raise any type of error on a new GPU
        lines = [line for line in str(error).splitlines() if line.strip()]
        return (Finding(what, False, f"{type(error).__name__}: {lines[0] if lines else 'no message'}"),)


def _gemm_findings(name: str, device: torch.device, multiply: Product) -> list[Finding]:
    """Whether a GEMM's operands have the reference's bytes, and its result is within the error bound."""
    lhs, lhs_axis, rhs, rhs_axis = _GEMMS[name]
    key = torch.tensor([1234, 44, 17, 32, 2], dtype=torch.int64, device="cpu")
    found, expected = [], []
    for x, spec, axis in zip(_tensors(lhs_axis, rhs_axis), (lhs, rhs), (lhs_axis, rhs_axis), strict=True):
        found.append(quantized_on(device, x, spec, axis, sr_key=key))
        expected.append(quantize(x, spec, axis, sr_key=key))
    out = multiply(found[0], found[1], torch.bfloat16, None).cpu()
    return [_bytes_finding(name, found, expected), _product_finding(name, out, expected)]


def _tensors(lhs_axis: int, rhs_axis: int) -> tuple[Tensor, Tensor]:
    """Two input tensors of the GEMMs, in the layouts given by their axes."""
    generator = torch.Generator().manual_seed(0)
    M, N, K = _SHAPE
    shapes = ((M, K) if lhs_axis == 1 else (K, M), (N, K) if rhs_axis == 1 else (K, N))
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(torch.bfloat16)
        for shape in shapes
    )  # pyright: ignore


def _bytes_finding(name: str, found: list[QuantizedTensor], expected: list[QuantizedTensor]) -> Finding:
    different = [
        f"{side} {field}"
        for side, mine, reference in zip(("lhs", "rhs"), found, expected, strict=True)
        for field in ("codes", "block_scale", "global_scale")
        if not torch.equal(_pattern(getattr(mine, field)), _pattern(getattr(reference, field)))
    ]
    return Finding(f"{name}: bytes", not different, ", ".join(different) or "equal to the reference's")


def _pattern(x: Tensor) -> Tensor:
    x = x.cpu().contiguous()
    return x.view(torch.int32 if x.element_size() == 4 else torch.uint8)


def _product_finding(name: str, out: Tensor, expected: list[QuantizedTensor]) -> Finding:
    share = share_of_bound(out, expected[0], expected[1])
    zero = not bool(out.any())
    detail = "all zero" if zero else f"{share:.2f} of the allowed error"
    return Finding(f"{name}: GEMM", share <= 1.0 and not zero, detail)


def quantized_on(
    device: torch.device,
    x: Tensor,
    spec: OperandSpec,
    axis: int,
    amax: Tensor | None = None,
    sr_key: Tensor | None = None,
) -> QuantizedTensor:
    """x, quantized on the device under test."""
    return quantize(x.to(device), spec, axis, amax, sr_key)


def _sums_findings(device: torch.device, multiply: Product) -> list[Finding]:
    """The chip whose sums these are: reported only, since any sums within the bound may train."""
    return [Finding("sums", True, str(examine_sums(device, multiply)))]


def _rounding_findings(device: torch.device) -> list[Finding]:
    """How often 2.3 rounds up to 3 at scale 1: expected floor(256 * 0.3) of 256 times."""
    x = torch.full((4096, 256), 2.3, device=device, dtype=torch.float32)
    x[:, ::16] = 6.0  # with amax 6 * 448 every block has scale 1 * 448
    key = torch.tensor([7, 11], device=device, dtype=torch.int64)
    q = quantized_on(
        device, x, _GRADIENT, 1, amax=torch.tensor(6.0, dtype=torch.float32, device="cpu"), sr_key=key
    )
    values = q.dequantize()[:, 1:]
    values = values[values < 5.0]
    share = float((values > 2.5).double().mean())
    expected = math.floor(256 * 0.3) / 256
    sigma = math.sqrt(expected * (1 - expected) / values.numel())
    passed = abs(share - expected) <= _SIGMAS * sigma
    detail = f"up in {share:.5f} of {values.numel()} cases, {expected:.5f} expected"
    return [Finding("stochastic rounding", passed, detail)]
