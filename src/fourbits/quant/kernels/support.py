"""The requests that the fused kernels support."""

import functools
import os
from collections.abc import Sequence
from dataclasses import fields

import torch

from fourbits.device import probe, unsupported_triton
from fourbits.quant.kernels.kernel_config import FP8_FORMATS, FP8_LENGTHS, LENGTHS, TRANSFORMS
from fourbits.quant.operand import OperandSpec
from fourbits.quant.request import OperandRequest, Signature
from fourbits.quant.scale_rules import FOUR_OVER_SIX, SEARCH
from fourbits.triton_version import HAS_TRITON

#: whether kernels run in Triton's interpreter, on CPU tensors
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
#: largest row stride for which 32 bits hold every offset within a tile of at most 128 rows
_LONGEST_ROW = (1 << 24) - 16
_FORMATS = ("nvfp4", "nvfp4-ue5m3", "nvfp4-ue5m3-global", "nve1m2", "mxfp4", "mxfp8", "mxfp8-e5m2")
#: formats whose packed form a kernel reads
UNPACKED_FORMATS = ("nvfp4", "mxfp4")
#: a row of codes is padded to a multiple of this; kernels read up to eight codes, and whole rows of a tile
_GROUP = 16
#: fields of a spec that a kernel's configuration covers, or that kernels can ignore; any other must have its
#: default
_UNDERSTOOD = {"format", "block", "source", "rounding", "rht", "rht_signs", "te_compat", "scale_rule"} | {
    *("scale_bound", "sr_headroom", "amax_policy", "amax_interval", "amax_history", "amax_headroom"),
    *("error_feedback", "feedback_interval"),
}
_DEFAULT = OperandSpec()


def unsupported(signature: Signature, requests: Sequence[OperandRequest]) -> str | None:
    """Why the fused kernels cannot compute these operands of a tensor in one pass, or None."""
    if reason := unsupported_device(signature.device):
        return reason
    if sorted(request.axis for request in requests) not in ([0], [1], [0, 1]):
        return "one pass makes at most one operand of each axis"
    for request in requests:
        if reason := unsupported_spec(request.spec):
            return reason
    if len(requests) > 1 and (reason := _unsupported_pair(requests)):
        return reason
    if requests[0].spec.error_feedback and (requests[0].packed or signature.scaled):
        return "error feedback has a kernel for an exact operand of a tensor without a factor"
    if signature.scaled and (reason := _unsupported_scaled(requests)):
        return reason
    rows, columns = signature.shape
    apart = signature.strides[0] if signature.strides[1] == 1 else 0
    length = max(rows, columns) if rotates(requests[0]) else rows if transposes(requests[0]) else columns
    if max(length, apart) > _LONGEST_ROW:
        return f"rows have more than {_LONGEST_ROW} elements"
    return None


def _unsupported_scaled(requests: Sequence[OperandRequest]) -> str | None:
    """Why no kernel multiplies a tensor by a factor before it computes these operands, or None."""
    (request, *more) = requests
    if more or request.axis == 1 or request.packed or request.spec.format in FP8_FORMATS:
        return "a tensor with a factor has a kernel for one exact operand along axis 0 only, not in FP8"
    return None


def _unsupported_pair(requests: Sequence[OperandRequest]) -> str | None:
    """Why one pass does not compute both operands of a tensor, each of which has a kernel, or None."""
    if any(request.spec.error_feedback for request in requests):
        return "error feedback quantizes in a pass of its own"
    if any(transposes(request) for request in requests):
        return "a transform along axis 1 needs a transposed copy, so a separate pass"
    if any(rotates(request) for request in requests):
        return "MS-EDEN transforms in a separate pass"
    if len({request.spec.format in FP8_FORMATS for request in requests}) > 1:
        return "FP8 and block formats of 4 bits come from different kernels"
    if requests[0].spec.format in FP8_FORMATS:
        return None
    if any(request.amax == "stored" for request in requests):
        if not all(request.spec.tensor_scaled for request in requests):
            return "amax policies need one scale per tensor in both operands"
        if any(request.packed for request in requests):
            return "amax policies need operands that are not packed"
    row, column = sorted(requests, key=lambda request: -request.axis)
    if row.packed:
        return "a packed operand along axis 1 has a separate kernel"
    return _unsupported_column(column.spec) if column.packed else None


def _unsupported_column(spec: OperandSpec) -> str | None:
    """Why one pass does not compute a packed column operand with an exact row operand, or None."""
    if spec.format not in UNPACKED_FORMATS:
        return f"packed {spec.format} has no kernel (there are {', '.join(UNPACKED_FORMATS)})"
    if spec.block_size is None or spec.block_size[0] != 1:
        return f"an operand that is kept packed has blocks of 1xN, got {spec.block_size}"
    return None


@functools.lru_cache(maxsize=4096)
def unsupported_packed_spec(spec: OperandSpec) -> str | None:
    """Why no kernel reads packed operands of this spec, or None."""
    if spec.format not in UNPACKED_FORMATS:
        return f"packed {spec.format} has no kernel (there are {', '.join(UNPACKED_FORMATS)})"
    size = spec.block_size
    if size is None or size[1] % _GROUP:  # an entry of codes has one scale
        return f"packed blocks must be a multiple of {_GROUP} long, got {size}"
    return None


@functools.lru_cache(maxsize=4096)
def unsupported_spec(spec: OperandSpec) -> str | None:
    """Why the fused kernels do not compute operands of this spec, or None."""
    for field in fields(spec):
        if field.name not in _UNDERSTOOD and getattr(spec, field.name) != getattr(_DEFAULT, field.name):
            return f"{field.name}={getattr(spec, field.name)!r} has no kernel"
    if spec.format not in (*_FORMATS, *FP8_FORMATS):
        return f"format {spec.format} has no kernel (there are {', '.join((*_FORMATS, *FP8_FORMATS))})"
    size, fp8 = spec.block_size, spec.format in FP8_FORMATS
    lengths = FP8_LENGTHS if fp8 else LENGTHS
    if size is None or size[0] not in (1, size[1]) or size[1] not in lengths:
        return f"{spec.format} blocks must be 1xN or NxN for N in {lengths}, got {size}"
    if fp8 and (spec.rounding != "rne" or spec.rht):
        return f"{spec.format} has kernels for rounding rne without a transform only"
    for name, known in (
        ("source", ("as_is", "bf16", "forward")),
        ("rounding", ("rne", "sr", "sr32", "ms-eden")),
        ("scale_rule", ("max", "ceil", *FOUR_OVER_SIX, *SEARCH)),
    ):
        if getattr(spec, name) not in known:
            return f"{name} {getattr(spec, name)} has no kernel"
    if spec.error_metric is not None and size[1] != 16:
        return f"{spec.scale_rule} has a kernel for blocks of 16, got {size}"
    if spec.rht and spec.rht not in TRANSFORMS:
        return f"a transform has a kernel for sizes {', '.join(map(str, TRANSFORMS))}, got {spec.rht}"
    return None


def transposes(request: OperandRequest) -> bool:
    """Whether this operand is computed from a transposed copy: kernels transform down the rows of a tile."""
    return request.axis == 1 and bool(request.spec.rht) and not rotates(request)


def rotates(request: OperandRequest) -> bool:
    """Whether the transform of this operand has a separate pass, which leaves registers for sums."""
    return request.spec.rounding == "ms-eden" and not request.packed and request.amax != "stored"


@functools.cache
def unsupported_device(device: torch.device) -> str | None:
    """Why the fused kernels, quantizers and GEMMs, do not run on a device, or None."""
    if device.type == "cuda":
        return unsupported_triton(probe(device))
    if INTERPRETED:
        return None
    return f"the fused kernels are for NVIDIA GPUs, the tensor is on {device.type}"


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Whether a device has FP8 conversions and FP8 tensor cores: NVIDIA GPUs from sm_89 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
