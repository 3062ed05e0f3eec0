"""The compile-time configuration of a fused kernel: the fields of an operand's spec that change its code.

Kernels are specialised on these objects, so specs with equal configurations share one compiled kernel.
"""

import functools
import math
from dataclasses import astuple, dataclass

import torch

from fourbits.formats.descriptors import FloatFormat
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.hadamard import sign_vector
from fourbits.quant.reference.scales import target_and_kappa
from fourbits.quant.scale_codes import SCALE_FORMATS
from fourbits.quant.scale_rules import SEARCH

FP8_FORMATS = ("fp8", "fp8-e5m2")
#: block lengths that have kernels, and sizes of transforms
LENGTHS, FP8_LENGTHS, TRANSFORMS = (16, 32), (128,), (16, 32, 64, 128)
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Transform:
    """A Hadamard transform: its size, size^-0.5 as fp32, and the source of its signs."""

    size: int
    scale: float
    #: bits of the negative signs, 32 to a word; empty where the kernel draws them from the key
    words: tuple[int, ...]
    per_call: bool


@dataclass(frozen=True, slots=True, eq=False)
class KernelConfig:
    """One operand. Block sizes are in the layout of the tensor that is read.

    `kernel_config` returns one object for equal content, so that a launch compares configurations by
    identity.
    """

    axis: int
    element: FloatFormat
    #: format of the block scale; None for powers of two
    scale: FloatFormat | None
    #: code of the scale of a non-finite ("poisoned") block
    scale_nan: int
    block_rows: int
    block_columns: int
    #: the value to which the tensor's amax is mapped (0: no global scale), and fp32(1 / largest element)
    target: float
    kappa: float
    #: powers of two: exponent of the largest element, and the fraction bits above which the scale is doubled
    emax_exponent: int
    largest_fraction: int
    rounding: str
    #: error that decides among candidate scales (mse, mae, max), empty without; whether they are the sixteen
    #: of a search, not the two of Four Over Six; factor on the scales
    metric: str
    search: bool
    headroom: float
    through_bf16: bool
    te_compat: bool
    transform: Transform | None


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """One operand in FP8 blocks of 128: its element format, and whether blocks are 128x128 or 1x128."""

    element: FloatFormat
    square: bool
    through_bf16: bool


_configs: dict[tuple[object, ...], KernelConfig] = {}


@functools.lru_cache(maxsize=1024)
def kernel_config(spec: OperandSpec, axis: int, packed: bool = False) -> KernelConfig:
    """The configuration of one operand, as codes if packed, else as exact values; spec has a kernel."""
    fmt, size = spec.block_format, spec.block_size
    assert fmt.element is not None
    assert size is not None
    scale = SCALE_FORMATS.get(fmt.scale or "")
    target, kappa = target_and_kappa(spec)
    fraction, exponent = math.frexp(fmt.element.max_value)
    config = KernelConfig(
        axis=axis,
        element=fmt.element,
        scale=scale,
        scale_nan=0xFF if scale is None else scale.nan_code or 0,
        block_rows=size[0] if axis == 1 else size[1],
        block_columns=size[1] if axis == 1 else size[0],
        target=target if fmt.has_global_scale else 0.0,
        kappa=kappa if scale is not None else 0.0,
        emax_exponent=exponent - 1,
        largest_fraction=int((2 * fraction - 1) * 2**23) if spec.scale_rule == "ceil" else 0x7FFFFF,
        rounding=spec.rounding,
        metric=spec.error_metric or "",
        search=spec.scale_rule in SEARCH,
        headroom=17 / 16 if spec.sr_headroom else 1.0,
        through_bf16=spec.source == "bf16",
        te_compat=spec.te_compat or not packed or spec.rounding == "ms-eden",
        transform=_transform(spec),
    )
    return _configs.setdefault(astuple(config), config)


@functools.lru_cache(maxsize=1024)
def fp8_config(spec: OperandSpec) -> Fp8Config:
    """The configuration of one FP8 operand; the kernels support the spec."""
    element, size = spec.block_format.element, spec.block_size
    assert element is not None
    assert size is not None
    return Fp8Config(element, size[0] == size[1], spec.source == "bf16")


def _transform(spec: OperandSpec) -> Transform | None:
    if not spec.rht:
        return None
    words: tuple[int, ...] = ()
    if spec.signs not in ("per-layer", "per-call"):
        signs = sign_vector(spec, None, _CPU)
        negative = [i for i, sign in enumerate(signs.tolist()) if sign < 0]
        words = tuple(sum(1 << (i % 32) for i in negative if i // 32 == word) for word in range(4))
    scale = torch.tensor(1.0 / math.sqrt(spec.rht), dtype=torch.float32, device="cpu").item()
    return Transform(spec.rht, scale, words, spec.signs == "per-call")
