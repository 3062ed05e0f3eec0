"""Operands on which sums of tensor cores are compared: any bytes, like data, cancelling."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import fourbits as fb
from fourbits.quant.tensor import QuantizedTensor

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu

#: pairs of operand specs, and which sums have an instruction for them
SPECS = {
    "nvfp4": (fb.OperandSpec(), fb.OperandSpec(block=(16, 16))),
    "nvfp4-rht": (fb.OperandSpec(rht=16), fb.OperandSpec(rht=16)),
    "mxfp4": (fb.OperandSpec(format="mxfp4"), fb.OperandSpec(format="mxfp4", block=(32, 32))),
    "mxfp8": (fb.OperandSpec(format="mxfp8"), fb.OperandSpec(format="mxfp8-e5m2")),
    "fp8": (fb.OperandSpec(format="fp8", block=(0, 0)), fb.OperandSpec(format="fp8-e5m2", block=(0, 0))),
    "fp8 in blocks": (
        fb.OperandSpec(format="fp8", block=(1, 128)),
        fb.OperandSpec(format="fp8", block=(128, 128)),
    ),
}
SUPPORTED = {
    "nvfp4": ("exact", "sm_100", "sm_103", "sm_90"),
    "nvfp4-rht": ("exact", "sm_100", "sm_103", "sm_90"),
    "mxfp4": ("exact", "sm_100", "sm_103", "sm_90"),
    "mxfp8": ("exact", "sm_100", "sm_103", "sm_90"),
    "fp8": ("exact", "sm_100", "sm_103", "sm_90_fp8"),
    "fp8 in blocks": ("exact", "sm_90_fp8"),
}


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bit pattern, NaN and infinity included; of E2M1, any code."""
    found = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return found.squeeze(-1) & 15 if dtype == torch.uint8 else found.view(dtype).squeeze(-1)


def like_data(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal values, or scales of a few octaves."""
    if dtype == torch.uint8:
        return torch.randint(0, 16, shape, dtype=torch.uint8)
    if dtype == E8M0:
        return torch.randint(118, 137, shape, dtype=torch.uint8).view(dtype)
    return torch.randn(shape).abs().to(dtype) if shape[-1] < 8 else torch.randn(shape).to(dtype)


def cancelling(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Few values with both signs, so that sums are far smaller than their terms; scales in any octave."""
    if dtype == torch.uint8:
        return torch.randint(0, 2, shape, dtype=torch.uint8) * 8 + 7
    if shape[-1] < 8:
        return random_bytes(shape, dtype)
    return (torch.randint(0, 2, shape) * 2.0 - 1.0).to(dtype)


def data(shape: tuple[int, int], spec: fb.OperandSpec, axis: int) -> QuantizedTensor:
    """Normal values, quantized."""
    return fb.quantize(torch.randn(shape), spec, axis)


def wide(shape: tuple[int, int], spec: fb.OperandSpec, axis: int) -> QuantizedTensor:
    """Blocks of many magnitudes, subnormal block scales and zeros among them."""
    x = torch.randn(shape) * torch.exp2(-torch.randint(0, 30, shape).float())
    return fb.quantize(torch.where(torch.rand(shape) < 0.1, 0.0, x), spec, axis)


def any_bytes(shape: tuple[int, int], spec: fb.OperandSpec, axis: int) -> QuantizedTensor:
    """Any codes under any scales, NaN and infinity where the formats have them."""
    q = fb.quantize(torch.randn(shape), spec, axis)
    codes = torch.randint(0, 256, q.codes.shape, dtype=torch.uint8)
    return replace(q, codes=codes.view(q.codes.dtype), block_scale=_any_scales(q.block_scale))


def numbers(shape: tuple[int, int], spec: fb.OperandSpec, axis: int) -> QuantizedTensor:
    """Any codes under any scales, without NaN and infinity."""
    q = any_bytes(shape, spec, axis)
    element, codes = q.spec.block_format.element, q.codes.view(torch.uint8)
    if element is not None and element.dtype is not None:
        bad = ~torch.isfinite(codes.view(element.dtype).float())
        codes = torch.where(bad, 0, codes)
    scale = q.block_scale
    if scale.numel():
        kept = torch.where(torch.isfinite(scale.float()), scale.float(), 1.0)
        scale = kept if scale.dtype == torch.float32 else kept.to(scale.dtype)
    return replace(q, codes=codes.view(q.codes.dtype), block_scale=scale)


def opposed(shape: tuple[int, int], spec: fb.OperandSpec, axis: int) -> QuantizedTensor:
    """Values +-1, so that sums are far smaller than their terms, in blocks of any magnitude."""
    signs = torch.randint(0, 2, shape) * 2.0 - 1.0
    q = fb.quantize(signs, spec, axis)
    if q.block_scale.dtype != E4M3:
        return q
    return replace(q, block_scale=_any_scales(q.block_scale))


#: ways to make an operand of a shape, a spec and an axis
OPERANDS: dict[str, Callable[[tuple[int, int], fb.OperandSpec, int], QuantizedTensor]] = {
    "data": data,
    "wide": wide,
    "any bytes": any_bytes,
    "numbers": numbers,
    "cancelling": opposed,
}


def _any_scales(scale: Tensor) -> Tensor:
    if scale.dtype == torch.float32:
        return torch.exp2(torch.randint(-20, 20, scale.shape).float()) * torch.rand(scale.shape)
    return torch.randint(0, 256, scale.shape, dtype=torch.uint8).view(scale.dtype)


def moved(q: QuantizedTensor, device: torch.device | str) -> QuantizedTensor:
    """The same bytes on a device."""
    fields = {name: getattr(q, name).to(device) for name in ("codes", "block_scale", "global_scale")}
    return replace(q, **fields)
