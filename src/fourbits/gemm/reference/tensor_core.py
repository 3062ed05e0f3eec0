"""The sum of one tensor-core instruction, to the bit: aligned to the largest term, truncated, rounded once.

An instruction multiplies a few elements of two rows and adds the products to the running FP32 sum c. Its
terms are the products (of groups, where it sums groups exactly first) and c. Each is truncated to a multiple
of 2^(E - F), where E is the largest exponent of a term; the truncated terms are added exactly; the result is
rounded toward zero. docs/nvfp4.md, section 22, has the rules and what is known about each chip.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fourbits.formats.codes import decode
from fourbits.formats.descriptors import E2M1

#: exponent of subnormal numbers, by dtype; uint8 holds E2M1 codes, one per element
SUBNORMAL_EXPONENT = {
    torch.float32: -126,
    torch.bfloat16: -126,
    torch.float16: -14,
    torch.float8_e4m3fn: -6,
    torch.float8_e5m2: -14,
    torch.float8_e8m0fnu: -127,
    torch.uint8: 0,
}
_NAN = 0x7FFFFFFF
#: bits of an FP64 significand without the leading one, and the bias of its exponent
_FP64_BITS, _FP64_BIAS = 52, 1023


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCore:
    """The arithmetic of one instruction for one output element."""

    name: str
    #: dtypes of its operands; uint8 stands for E2M1 codes
    operands: tuple[torch.dtype, ...]
    #: products of one instruction
    products: int
    #: products that are summed exactly before they are aligned, as one term
    group: int = 1
    #: F: terms are truncated this many bits below the largest exponent
    fraction_bits: int = 25
    #: bits of the result below the leading one
    result_bits: int = 23
    #: exponent of a term that is zero
    zero_exponent: int = -133
    #: elements that share a block scale in each operand; () for instructions without scales
    scale_blocks: tuple[int, ...] = ()


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF = (torch.bfloat16, torch.float16)


def _fp4(name: str, products: int) -> TensorCore:
    return TensorCore(
        name=name,
        operands=(torch.uint8,),
        products=products,
        group=16,
        fraction_bits=35,
        zero_exponent=-139,
        scale_blocks=(16, 32),
    )


_INSTRUCTIONS = (
    _fp4("sm_100-fp4", 64),
    _fp4("sm_103-fp4", 96),
    TensorCore(name="sm_100-mxfp8", operands=_FP8, products=32, scale_blocks=(32,)),
    TensorCore(name="sm_100-fp8", operands=_FP8, products=32),
    TensorCore(name="sm_100-bf16", operands=_HALF, products=16),
    TensorCore(name="sm_90-fp8", operands=_FP8, products=32, fraction_bits=13, result_bits=13),
    TensorCore(name="sm_90-bf16", operands=_HALF, products=16),
    TensorCore(
        name="sm_89-fp8",
        operands=_FP8,
        products=16,
        fraction_bits=13,
        result_bits=13,
        zero_exponent=-132,
    ),
    TensorCore(name="sm_89-bf16", operands=_HALF, products=8, fraction_bits=24, zero_exponent=-132),
    TensorCore(name="sm_80-bf16", operands=_HALF, products=8, fraction_bits=24, zero_exponent=-132),
)
#: the instructions whose sums are known, by name
TENSOR_CORES = {core.name: core for core in _INSTRUCTIONS}


def tensor_core_dot(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    core: TensorCore | str,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
) -> Tensor:
    """c plus the sum of a * b along the last dimension, as one instruction of a tensor core computes it.

    a, b: [..., products] in a dtype of `core.operands` (E2M1 codes as uint8, one per element); c: fp32 [...];
    scale_a, scale_b: float8_e4m3fn (the sign is ignored) or float8_e8m0fnu [..., products / block], for
    instructions with block scales. Leading dimensions broadcast. Returns fp32 [...]; NaN is 0x7FFFFFFF, and
    -0 becomes +0. Raises ValueError for other dtypes and lengths. docs/nvfp4.md, section 22.
    """
    core = _checked(a, b, c, core, scale_a, scale_b)
    if core.group > 1:
        significands, exponents, zero = _groups(a, b, core.group)
    else:
        (left, high), (right, low) = split(_values(a), a.dtype), split(_values(b), b.dtype)
        significands, exponents = left * right, high + low
        zero = significands == 0
    for scale in (scale_a, scale_b):
        if scale is not None:
            factor, exponent = split(scale.to(torch.float64).abs(), scale.dtype)
            terms = significands.shape[-1] // scale.shape[-1]
            factor, exponent = (x.repeat_interleave(terms, -1) for x in (factor, exponent))
            significands, exponents = significands * factor, exponents + exponent
            zero = zero | (factor == 0)
    running, exponent = split(c.to(torch.float64), c.dtype)
    shape = torch.broadcast_shapes(significands.shape[:-1], c.shape)
    significands, exponents, zero = (
        torch.cat((x.expand(*shape, x.shape[-1]), y.expand(shape)[..., None]), -1)
        for x, y in ((significands, running), (exponents, exponent), (zero, running == 0))
    )
    exponents = torch.where(zero, core.zero_exponent, exponents)
    return fused_sum(significands, exponents, core)


def fused_sum(significands: Tensor, exponents: Tensor, core: TensorCore) -> Tensor:
    """The sum of terms significand * 2^exponent along the last dimension.

    significands: fp64, exponents: int64, [..., terms] -> fp32 [...].
    """
    largest = exponents.amax(-1)
    fraction = core.fraction_bits
    kept = torch.trunc(significands * power_of_two(exponents - largest[..., None] + fraction))
    total = kept.sum(-1) * power_of_two(largest - fraction)
    return to_fp32(toward_zero(total, core.result_bits))


def toward_zero(x: Tensor, bits: int) -> Tensor:
    """x, fp64, rounded toward zero to `bits` bits below the leading one, in FP32's range of exponents.

    At 2^128 and above it becomes infinity; below 2^-126, multiples of 2^-(126 + bits) are kept.
    """
    dropped = (1 << (_FP64_BITS - bits)) - 1
    normal = (x.view(torch.int64) & ~dropped).view(torch.float64)
    subnormal = torch.trunc(x * 2.0 ** (126 + bits)) * 2.0 ** -(126 + bits)
    rounded = torch.where(x.abs() < 2.0**-126, subnormal, normal)
    rounded = torch.where(x.abs() >= 2.0**128, torch.copysign(torch.full_like(x, torch.inf), x), rounded)
    return torch.where(torch.isnan(x), x, rounded)


def to_fp32(x: Tensor) -> Tensor:
    """fp64 numbers that FP32 holds, with the tensor cores' NaN and without -0."""
    out = x.to(torch.float32) + 0.0
    nan = torch.full_like(out, _NAN, dtype=torch.int32).view(torch.float32)
    return torch.where(torch.isnan(out), nan, out)


def split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Significand (fp64, 1 <= |s| < 2; below 1 for subnormals) and exponent (int64) of x, fp64.

    dtype: the format that x comes from. Zeros have its subnormals' exponent.
    """
    lowest = SUBNORMAL_EXPONENT[dtype]
    field = (x.view(torch.int64) >> _FP64_BITS) & (2 * _FP64_BIAS + 1)
    exponent = (field - _FP64_BIAS).clamp(lowest, 127)  # infinity has FP32's largest exponent
    return x * power_of_two(-exponent), exponent


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp64, for int64 exponents; 0 below 2^-1022."""
    return ((exponent + _FP64_BIAS).clamp(0, 2 * _FP64_BIAS) << _FP64_BITS).view(torch.float64)


def _groups(a: Tensor, b: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Exact sums of groups of products, with exponent 0, and which groups have only zero products."""
    products = (_values(a) * _values(b)).unflatten(-1, (-1, size))
    total = products.sum(-1)
    return total, torch.zeros_like(total, dtype=torch.int64), (products == 0).all(-1)


def _values(x: Tensor) -> Tensor:
    return (decode(x, E2M1) if x.dtype == torch.uint8 else x).to(torch.float64)


def _checked(
    a: Tensor, b: Tensor, c: Tensor, core: TensorCore | str, scale_a: Tensor | None, scale_b: Tensor | None
) -> TensorCore:
    """The instruction. Raises ValueError unless the operands are its own."""
    if isinstance(core, str):
        if core not in TENSOR_CORES:
            raise ValueError(
                f"tensor_core_dot: core must be one of {', '.join(TENSOR_CORES)}, got {core!r}. Pass one of "
                "these, or a TensorCore."
            )
        core = TENSOR_CORES[core]
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in core.operands:
            allowed = " or ".join(str(dtype) for dtype in core.operands)
            raise ValueError(
                f"tensor_core_dot: {name} must be {allowed} for {core.name}, got {x.dtype}. Convert it, or "
                "choose another core."
            )
        if x.shape[-1:] != (core.products,):
            raise ValueError(
                f"tensor_core_dot: the last dimension of {name} must be the {core.products} products of "
                f"{core.name}, got {list(x.shape)}. Pad it with zeros."
            )
    if c.dtype != torch.float32:
        raise ValueError(f"tensor_core_dot: c must be float32, got {c.dtype}. Convert it with c.float().")
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        _check_scale(name, scale, core)
    if scale_a is not None and scale_b is not None and scale_a.dtype != scale_b.dtype:
        raise ValueError(
            f"tensor_core_dot: scale_a and scale_b must have one dtype for {core.name}, got {scale_a.dtype} "
            f"and {scale_b.dtype}. Convert one."
        )
    return core


def _check_scale(name: str, scale: Tensor | None, core: TensorCore) -> None:
    if scale is None and not core.scale_blocks:
        return
    counts = [core.products // block for block in core.scale_blocks]
    dtypes = (torch.float8_e4m3fn, torch.float8_e8m0fnu) if core.group > 1 else (torch.float8_e8m0fnu,)
    if scale is None or scale.dtype not in dtypes or scale.shape[-1] not in counts:
        given = "None" if scale is None else f"{scale.dtype} {list(scale.shape)}"
        allowed = (
            f"{' or '.join(map(str, dtypes))} with {' or '.join(map(str, counts))} in the last dimension"
            if counts
            else "None"
        )
        raise ValueError(
            f"tensor_core_dot: {name} must be {allowed} for {core.name}, got {given}. Pass it so, or choose "
            "another core."
        )
