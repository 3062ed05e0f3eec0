"""What a fused kernel is compiled for: an operand's spec, reduced to numbers.

Kernels are specialised on these objects, so specs with equal plans share one compiled kernel.
"""

import functools
import math
from dataclasses import astuple, dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.formats.descriptors import FloatFormat
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.hadamard import sign_vector
from fourbits.quant.reference.scales import target_and_kappa
from fourbits.quant.scale_codes import SCALE_FORMATS

_FORMATS = ("nvfp4", "nvfp4-ue5m3", "nve1m2", "mxfp4", "mxfp8", "mxfp8-e5m2")
FP8_FORMATS = ("fp8", "fp8-e5m2")
#: sizes of transforms
_TRANSFORMS = (16, 32, 64, 128)
#: fields of a spec that a plan covers, or that do not concern a kernel; any other must have its default
_UNDERSTOOD = {"format", "block", "source", "rounding", "rht", "rht_signs", "te_compat", "scale_rule"} | {
    *("scale_bound", "sr_headroom", "amax_policy", "amax_interval", "amax_history", "amax_headroom")
}
_DEFAULT = OperandSpec()
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Grid:
    """A float grid: exponent of the smallest normal, mantissa bits, largest magnitude, bits of a code."""

    min_exponent: int
    mantissa_bits: int
    largest: float
    bits: int


@dataclass(frozen=True, slots=True)
class Transform:
    """A Hadamard transform: its size, size^-0.5 as fp32, and where its signs come from."""

    size: int
    scale: float
    #: bits of the negative signs, 32 to a word; empty where the kernel draws them from the key
    words: tuple[int, ...]
    per_call: bool


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One operand. Block sizes are in the layout of the tensor that is read.

    Plans of equal content are one object (`plan` sees to it), so that a launch compares them by identity.
    """

    axis: int
    element: Grid
    #: grid of the block scale; None for powers of two
    scale: Grid | None
    #: code of a poisoned block's scale
    scale_nan: int
    block_rows: int
    block_columns: int
    #: what the tensor's amax is mapped to (0: no scale of the whole tensor), and fp32(1 / largest element)
    target: float
    kappa: float
    #: powers of two: exponent of the largest element, and the fraction bits above which the scale is doubled
    emax_exponent: int
    largest_fraction: int
    rounding: str
    #: error by which Four Over Six chooses (mse, mae, max), empty without it; factor on its scales
    metric: str
    headroom: float
    through_bf16: bool
    te_compat: bool
    transform: Transform | None


@dataclass(frozen=True, slots=True)
class Fp8Plan:
    """One operand in FP8 blocks of 128: the grid, and whether blocks are 128x128 or 1x128."""

    element: Grid
    square: bool
    through_bf16: bool


class NoiseKey(NamedTuple):
    """Where a kernel finds (seed, stream, step, first row, first block): entries `fields` of an int64 tensor.

    `stream` is added to the entry of that name, so that one tensor serves every layer and role.
    """

    entries: Tensor
    fields: tuple[int, ...] = (0, 1, 2, 3, 4)
    stream: int = 0


_plans: dict[tuple[object, ...], Plan] = {}


@functools.lru_cache(maxsize=1024)
def plan(spec: OperandSpec, axis: int, packed: bool = False) -> Plan:
    """The plan of one operand, as codes if packed, else as exact values; the spec has no obstacle."""
    fmt, size = spec.block_format, spec.block_size
    assert obstacle(spec, axis) is None
    assert fmt.element is not None
    assert size is not None
    scale = SCALE_FORMATS.get(fmt.scale or "")
    target, kappa = target_and_kappa(spec)
    fraction, exponent = math.frexp(fmt.element.max_value)
    made = Plan(
        axis=axis,
        element=_grid(fmt.element),
        scale=None if scale is None else _grid(scale),
        scale_nan=0xFF if scale is None else scale.nan_code or 0,
        block_rows=size[0] if axis == 1 else size[1],
        block_columns=size[1] if axis == 1 else size[0],
        target=target if fmt.has_global_scale else 0.0,
        kappa=kappa if scale is not None else 0.0,
        emax_exponent=exponent - 1,
        largest_fraction=int((2 * fraction - 1) * 2**23) if spec.scale_rule == "ceil" else 0x7FFFFF,
        rounding=spec.rounding,
        metric=spec.error_metric or "",
        headroom=17 / 16 if spec.sr_headroom else 1.0,
        through_bf16=spec.source == "bf16",
        te_compat=spec.te_compat or not packed or spec.rounding == "ms-eden",
        transform=_transform(spec),
    )
    return _plans.setdefault(astuple(made), made)


@functools.lru_cache(maxsize=1024)
def fp8_plan(spec: OperandSpec) -> Fp8Plan:
    """The plan of one FP8 operand; the spec has no obstacle."""
    element, size = spec.block_format.element, spec.block_size
    assert element is not None
    assert size is not None
    return Fp8Plan(_grid(element), size[0] == size[1], spec.source == "bf16")


@functools.lru_cache(maxsize=4096)
def obstacle(spec: OperandSpec, axis: int) -> str | None:
    """Why the fused kernels do not compute this operand, or None."""
    size = spec.block_size
    for field in fields(spec):
        if field.name not in _UNDERSTOOD and getattr(spec, field.name) != getattr(_DEFAULT, field.name):
            return f"{field.name}={getattr(spec, field.name)!r} has no kernel"
    if spec.format not in (*_FORMATS, *FP8_FORMATS):
        return f"format {spec.format} has no kernel (there are {', '.join((*_FORMATS, *FP8_FORMATS))})"
    lengths = (128,) if spec.format in FP8_FORMATS else (16, 32)
    if size is None or size[0] not in (1, size[1]) or size[1] not in lengths:
        return f"{spec.format} blocks must be 1xN or NxN for N in {lengths}, got {size}"
    if spec.format in FP8_FORMATS and (spec.rounding != "rne" or spec.rht):
        return f"{spec.format} has kernels for rounding rne without a transform only"
    for name, known in (
        ("source", ("as_is", "bf16", "forward")),
        ("rounding", ("rne", "sr", "sr32", "ms-eden")),
        ("scale_rule", ("max", "ceil", "4over6-mse", "4over6-mae", "4over6-max")),
    ):
        if getattr(spec, name) not in known:
            return f"{name} {getattr(spec, name)} has no kernel"
    if spec.rht and spec.rht not in _TRANSFORMS:
        return f"a transform has a kernel for sizes {', '.join(map(str, _TRANSFORMS))}, got {spec.rht}"
    return None


def _grid(fmt: FloatFormat) -> Grid:
    return Grid(fmt.min_exponent, fmt.mantissa_bits, fmt.max_value, fmt.bits)


def _transform(spec: OperandSpec) -> Transform | None:
    if not spec.rht:
        return None
    words: tuple[int, ...] = ()
    if spec.signs not in ("per-layer", "per-call"):
        signs = sign_vector(spec, None, _CPU)
        negative = [i for i, sign in enumerate(signs.tolist()) if sign < 0]
        words = tuple(sum(1 << (i % 32) for i in negative if i // 32 == word) for word in range(4))
    scale = torch.tensor(1.0 / math.sqrt(spec.rht), dtype=torch.float32).item()
    return Transform(spec.rht, scale, words, spec.signs == "per-call")
