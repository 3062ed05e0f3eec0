"""The public entry of quantization: from a tensor to a packed or an exact operand. docs/nvfp4.md, section 6.

Bits never depend on who computes. The reference (`quantize_reference.py`) runs eagerly on small tensors; on
larger ones the same source runs compiled.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fourbits.quant import quantize_reference as reference
from fourbits.quant.blocks import block_view, lane_view, padded, scale_grid, unblock
from fourbits.quant.compiled import compiled
from fourbits.quant.hadamard import butterfly, sign_vector
from fourbits.quant.operand import OperandSpec
from fourbits.quant.philox import as_sr_key, byte_noise, word_noise
from fourbits.quant.scaling import Scales
from fourbits.quant.tensor import ExactOperand, QuantizedTensor, encode_scales, pack_codes

#: elements from which the compiled source is worth its compilation
COMPILE_FROM = 1 << 16

Runner = Callable[[Callable[..., Any]], Callable[..., Any]]


def quantize(
    x: Tensor, spec: OperandSpec, axis: int = -1, amax: Tensor | None = None, sr_key: Tensor | None = None
) -> QuantizedTensor:
    """Codes and scales of x as a GEMM operand.

    x: 2-D fp32, bf16 or fp16; axis: the contraction axis, 0 or 1 (or -1, -2); amax: fp32 scalar to use
    instead of the tensor's own (of the transformed tensor where spec.rht is set); sr_key: int64 [5] (seed,
    stream, step, first row, first 16-element block) or [2] (seed, step), required by stochastic rounding.
    Raises ValueError for other inputs.
    """
    axis, amax, sr_key = checked(x, spec, axis, amax, sr_key)
    shape = (x.shape[0], x.shape[1])
    run = _runner(x)
    if spec.block_format.element is None:
        values = prepared(x, spec, axis, sr_key, run).to(spec.block_format.dtype)
        return QuantizedTensor(_stored(values, axis), _empty_scale(x), _one(x), axis, shape, spec)
    ready = prepared(x, spec, axis, sr_key, run)
    blocks, scales, noise = _measured(ready, spec, axis, amax, sr_key, run)
    codes = unblock(
        run(reference.element_codes)(blocks, scales, spec.for_rounding(), noise), spec, axis, ready.shape
    )
    if not spec.rht and ready.shape[axis] != x.shape[axis]:
        codes = padded(
            codes[: x.shape[0], : x.shape[1]], spec, axis
        )  # padding codes are 0, in poisoned blocks too
    packed = run(pack_codes)(_stored(codes, axis), spec.for_rounding())
    if spec.block_size is None:
        return QuantizedTensor(packed, _empty_scale(x), scales.block_scale.reshape(()), axis, shape, spec)
    grid = encode_scales(scale_grid(scales.block_scale, spec, axis, ready.shape), spec.block_format)
    return QuantizedTensor(packed, _stored(grid, axis), scales.global_scale, axis, shape, spec)


def exact_operand(
    x: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None = None, sr_key: Tensor | None = None
) -> ExactOperand:
    """Values ready for a GEMM, equal to those of `quantize`'s codes and scales; arguments as there."""
    axis, amax, sr_key = checked(x, spec, axis, amax, sr_key)
    run = _runner(x)
    ready = prepared(x, spec, axis, sr_key, run)
    if spec.block_format.element is None:
        return ExactOperand(ready.to(spec.block_format.dtype), _one(x), axis, spec)
    blocks, scales, noise = _measured(ready, spec, axis, amax, sr_key, run)
    values = run(reference.exact_values)(blocks, scales, spec.for_rounding(), noise)
    values = unblock(values, spec, axis, ready.shape)
    if spec.block_format.scale != "fp32":
        return ExactOperand(values, scales.global_scale, axis, spec)
    if spec.block_size is None:
        return ExactOperand(values, scales.block_scale.reshape(()), axis, spec)
    return ExactOperand(values, scale_grid(scales.block_scale, spec, axis, ready.shape), axis, spec)


def checked(
    x: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None, sr_key: Tensor | None
) -> tuple[int, Tensor | None, Tensor | None]:
    """Axis as 0 or 1, a given amax as an fp32 scalar, the full key. Raises ValueError for what cannot be
    quantized.
    """
    if x.dim() != 2 or axis not in (-2, -1, 0, 1):
        raise ValueError(
            f"quantize: x must be 2-D and axis 0 or 1, got shape {list(x.shape)}, axis {axis}. "
            "Flatten x first."
        )
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"quantize: x must be float32, bfloat16 or float16, got {x.dtype}. Cast it first.")
    if amax is not None:
        if not spec.block_format.has_global_scale and spec.block_size is not None:
            raise ValueError(
                f"quantize: {spec.format} has no scale of the whole tensor, so amax means nothing. "
                "Leave it out."
            )
        amax = amax.to(torch.float32).reshape(()).abs()
    if spec.stochastic and sr_key is None:
        raise ValueError(
            f"quantize: rounding={spec.rounding!r} needs sr_key, the seed and counter of its random bits."
        )
    return axis % 2, amax, None if sr_key is None else as_sr_key(sr_key)


def prepared(x: Tensor, spec: OperandSpec, axis: int, sr_key: Tensor | None, run: Runner) -> Tensor:
    """The tensor that is quantized, in x's layout: its source, padded along axis to Cp, transformed."""
    x = padded(x.to(torch.bfloat16) if spec.source == "bf16" else x, spec, axis)
    if not spec.rht or x.numel() == 0:
        return x
    signs = sign_vector(spec, sr_key, x.device)
    return run(butterfly)(lane_view(x, spec.rht, axis), signs).reshape(x.shape)


def _measured(
    ready: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None, sr_key: Tensor | None, run: Runner
) -> tuple[Tensor, Scales, Tensor | None]:
    """Blocks of the prepared tensor, their scales, and the noise in the same blocks."""
    blocks = block_view(ready, spec, axis)
    if blocks.numel() == 0:
        amax = torch.zeros((), dtype=torch.float32, device=ready.device)
    scales = run(reference.measure)(blocks, spec.for_measuring(), amax)
    if not spec.stochastic:
        return blocks, scales, None
    draw = byte_noise if spec.rounding == "sr" else word_noise
    noise = run(draw)(sr_key, ready.shape[1 - axis], ready.shape[axis] // 16, axis)
    return blocks, scales, block_view(noise, spec, axis)


def _runner(x: Tensor) -> Runner:
    """Eager below COMPILE_FROM elements, compiled above."""
    return compiled if x.numel() >= COMPILE_FROM else _eager


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _stored(x: Tensor, axis: int) -> Tensor:
    """Rows first, the contraction axis last, contiguous."""
    return (x.t() if axis == 0 else x).contiguous()


def _empty_scale(x: Tensor) -> Tensor:
    return torch.empty((0, 0), dtype=torch.float32, device=x.device)


def _one(x: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=x.device)
