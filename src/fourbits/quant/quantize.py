"""The public entry of quantization: from a tensor to a packed or an exact operand. docs/nvfp4.md, section 6.

Bytes never depend on the implementation. The reference runs eagerly on small tensors and while torch.compile
traces a caller; on larger CPU tensors its stages run compiled.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.quant.cpu import quantize as cpu
from fourbits.quant.cpu.compiled import worth_compiling
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference import quantize as reference
from fourbits.quant.reference.philox import as_sr_key
from fourbits.quant.tensor import ExactOperand, QuantizedTensor


class _Job(NamedTuple):
    """The checked arguments in their normal form."""

    spec: OperandSpec
    axis: int
    amax: Tensor | None
    sr_key: Tensor | None


@torch.no_grad()
def quantize(
    x: Tensor, spec: OperandSpec, axis: int = -1, amax: Tensor | None = None, sr_key: Tensor | None = None
) -> QuantizedTensor:
    """Codes and scales of x as a GEMM operand.

    x: 2-D fp32, bf16 or fp16; axis: the contraction axis, 0 or 1 (or -1, -2); amax: fp32 scalar to use
    instead of the tensor's own (of the transformed tensor where spec.rht is set); sr_key: int64 [5] (seed,
    stream, step, first row, first 16-element block) or [2] (seed, step), required where random bits are.
    Raises ValueError for other inputs.
    """
    job = _checked(x, spec, axis, amax, sr_key)
    return (cpu if worth_compiling(x) else reference).quantize(x, *job)


@torch.no_grad()
def exact_operand(
    x: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None = None, sr_key: Tensor | None = None
) -> ExactOperand:
    """Values ready for a GEMM, equal to those of `quantize`'s codes and scales; arguments as there."""
    job = _checked(x, spec, axis, amax, sr_key)
    return (cpu if worth_compiling(x) else reference).exact_operand(x, *job)


def _checked(x: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None, sr_key: Tensor | None) -> _Job:
    """The arguments in their normal form. Raises ValueError for what cannot be quantized."""
    _check_types(x, spec, axis, amax)
    if x.dim() != 2:
        raise ValueError(f"quantize: x must be 2-D, got shape {list(x.shape)}. Flatten x first.")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"quantize: x must be float32, bfloat16 or float16, got {x.dtype}. Cast it first.")
    if amax is not None:
        if not spec.tensor_scaled:
            raise ValueError(
                f"quantize: {spec.format} has no scale of the whole tensor, so amax means nothing. "
                "Leave it out."
            )
        amax = amax.to(torch.float32).reshape(()).abs()
    if spec.stochastic and sr_key is None:
        raise ValueError(
            f"quantize: rounding={spec.rounding!r}, scale_rounding={spec.scale_rounding!r} needs sr_key, "
            "the seed and counter of its random bits."
        )
    key = None if sr_key is None else as_sr_key(sr_key)
    return _Job(spec, axis % 2, amax, key)


def _check_types(x: object, spec: object, axis: object, amax: object) -> None:
    """What annotations say, for callers who do not check them."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        got = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"quantize: x must be a dense tensor, got {got}. Convert it first.")
    if not isinstance(spec, OperandSpec):
        raise ValueError(
            f"quantize: spec must be an OperandSpec, got {spec!r}. Write OperandSpec(format=...)."
        )
    if not isinstance(axis, int) or axis not in (-2, -1, 0, 1):
        raise ValueError(
            f"quantize: axis must be 0 or 1 (or -2, -1), the one that is summed over, got {axis!r}."
        )
    if amax is not None and not (isinstance(amax, Tensor) and amax.numel() == 1):
        got = list(amax.shape) if isinstance(amax, Tensor) else repr(amax)
        raise ValueError(
            f"quantize: amax must be a tensor of one number, got {got}. Write torch.tensor(3.0)."
        )
