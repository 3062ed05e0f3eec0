"""The seam to the fused kernels: the operands of a tensor from one read, without host syncs.

`fused_operands` gives the bits of `exact_operand`, `fused_quantize` those of `quantize`, or they raise
ValueError with the reason; `why_not_fused` says it beforehand. Nothing here falls back: the caller decides
who computes.
"""

import functools
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fourbits.device import probe, triton_blocker
from fourbits.quant.operand import OperandSpec
from fourbits.quant.philox import as_sr_key
from fourbits.quant.plan import FP8_FORMATS, NoiseKey, Plan, fp8_plan, obstacle, plan
from fourbits.quant.tensor import ExactOperand, QuantizedTensor

_HAS_TRITON = find_spec("triton") is not None
if TYPE_CHECKING or _HAS_TRITON:
    from fourbits.quant import fused_triton as kernels

_SCALE_DTYPES = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu, "ue5m3": torch.uint8}
_FP8_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}


class Wanted(NamedTuple):
    """One operand to make of a tensor."""

    spec: OperandSpec
    axis: int
    #: int64 [5] or [2] (see `quantize`), or where a kernel finds the entries; for what draws random bits
    key: NoiseKey | Tensor | None = None
    #: fp32: the maximum to use instead of the tensor's own, or partial maxima of it
    amax: Tensor | None = None
    #: fp32 scalar that an amax policy has stored: as amax, or negative to use the tensor's own
    stored: Tensor | None = None


def why_not_fused(x: Tensor, wanted: Sequence[Wanted]) -> str | None:
    """Why the fused kernels cannot make these operands of x in one read, or None. Costs microseconds."""
    if reason := device_blocker(x.device):
        return reason
    if sorted(want.axis for want in wanted) not in ([0], [1], [0, 1]):
        return "one read makes at most one operand of each axis"
    for want in wanted:
        if reason := obstacle(want.spec, want.axis):
            return reason
    if len(wanted) > 1 and any(_turns(want) for want in wanted):
        return "a transform along axis 1 is made from a turned copy, so alone"
    fp8 = {want.spec.format in FP8_FORMATS for want in wanted}
    if len(fp8) > 1:
        return "FP8 and block formats of 4 bits come from different kernels"
    if fp8 == {True} and x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9):
        return "FP8 tensor cores need sm_89 or newer"
    return None


def fused_operands(x: Tensor, wanted: Sequence[Wanted]) -> tuple[ExactOperand, ...]:
    """Exact operands of x in the order of `wanted`, at most one for each axis.

    x: 2-D fp32, bf16 or fp16 on a CUDA device. One read for the amaxes that are not given, one for the
    operands. FP8 operands have float8 values whose contraction axis is contiguous, as FP8 tensor cores want.
    Raises ValueError with the reason where the kernels cannot do it.
    """
    if len(wanted) == 1 and _turns(wanted[0]):
        return _turned_back(fused_operands(_turned(x, wanted), [wanted[0]._replace(axis=0)]))
    return _operands(x, wanted, observe=False)[0]


def fused_observed(
    x: Tensor, wanted: Sequence[Wanted], into: tuple[Tensor, Tensor], places: Sequence[int]
) -> tuple[ExactOperand, ...]:
    """`fused_operands`, which also writes what `own_amax` gives of each operand, from the same read.

    into: own amaxes fp32 [n] and counts int64 [n, 2 or more]; places: for each operand wanted, where in them
    its own belong. Every operand wanted has one scale for the whole tensor.
    """
    if len(wanted) == 1 and _turns(wanted[0]):
        found = fused_observed(_turned(x, wanted), [wanted[0]._replace(axis=0)], into, places)
        return _turned_back(found)
    made, seen = _operands(x, wanted, observe=True)
    assert seen is not None
    blocks, at = [0, 0], [-1, -1]
    for want, place in zip(wanted, places, strict=True):
        blocks[1 - want.axis], at[1 - want.axis] = _number_of_blocks(x, want), place
    kernels.notes(seen, (blocks[0], blocks[1]), (at[0], at[1]), into)
    return made


def _turns(want: Wanted) -> bool:
    """Whether this operand is made from a turned copy: kernels transform down the rows of a tile."""
    return want.axis == 1 and bool(want.spec.rht)


def _turned(x: Tensor, wanted: Sequence[Wanted]) -> Tensor:
    return _checked(x, wanted).t().contiguous()


def _turned_back(made: tuple[ExactOperand, ...]) -> tuple[ExactOperand, ...]:
    """Operands of the tensor from those of its turned copy: views."""
    return tuple(ExactOperand(operand.values.t(), operand.scale, 1, operand.spec) for operand in made)


def _number_of_blocks(x: Tensor, want: Wanted) -> int:
    size = want.spec.block_size
    assert size is not None
    padded = -(-x.shape[want.axis] // max(16, want.spec.rht)) * max(16, want.spec.rht)
    return -(-x.shape[1 - want.axis] // size[0]) * -(-padded // size[1])


def _operands(
    x: Tensor, wanted: Sequence[Wanted], observe: bool
) -> "tuple[tuple[ExactOperand, ...], kernels.Observed | None]":
    x = _checked(x, wanted)
    if wanted[0].spec.format in FP8_FORMATS:
        return tuple(_fp8_operand(q) for q in _fp8(x, wanted)), None
    row, column = _by_axis(wanted)
    row_plan, column_plan = (None if want is None else plan(want.spec, want.axis) for want in (row, column))
    keys = (_noise_key(row), _noise_key(column))
    amaxes = _amaxes(x, (row, column), (row_plan, column_plan), keys[1])
    row_values, column_values, scales, seen = kernels.exact(x, row_plan, column_plan, amaxes, keys, observe)
    made: list[ExactOperand] = []
    for want in wanted:
        values = row_values if want.axis == 1 else column_values
        assert values is not None
        made.append(ExactOperand(values, scales[1 - want.axis], want.axis, want.spec))
    return tuple(made), seen


def fused_quantize(x: Tensor, wanted: Sequence[Wanted]) -> tuple[QuantizedTensor, ...]:
    """Codes and scales of x, as `quantize` gives them, in the order of `wanted`. Arguments as there."""
    x = _checked(x, wanted)
    if wanted[0].spec.format in FP8_FORMATS:
        return _fp8(x, wanted)
    made: list[QuantizedTensor] = []
    for want in wanted:
        codes, scale, global_scale = _packed_of(x, want, swizzled=False)
        scale = scale.view(_SCALE_DTYPES[want.spec.block_format.scale or ""])
        shape = (x.shape[0], x.shape[1])
        made.append(QuantizedTensor(codes, scale, global_scale, want.axis, shape, want.spec))
    return tuple(made)


def fused_swizzled(x: Tensor, want: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, block scales as flat bytes in the layout of `swizzle_scales`, global scale), for Blackwell."""
    x = _checked(x, [want])
    if want.spec.format in FP8_FORMATS:
        raise ValueError(f"fused_swizzled: {want.spec.format} has no swizzled scales. Use fused_quantize.")
    return _packed_of(x, want, swizzled=True)


def why_not_unpacked(q: QuantizedTensor) -> str | None:
    """Why no kernel makes the exact form of a packed operand, or None."""
    if reason := device_blocker(q.codes.device):
        return reason
    if q.spec.format not in ("nvfp4", "mxfp4") or q.global_scale.dim():
        return f"packed {q.spec.format} has no kernel (there are nvfp4, mxfp4)"
    return None


def fused_unpacked(q: QuantizedTensor) -> ExactOperand:
    """What `unpacked` gives. Raises ValueError with the reason where no kernel does."""
    if reason := why_not_unpacked(q):
        raise ValueError(f"unpacking: {reason}. Use the reference, unpacked(q).")
    size = q.spec.block_size
    assert size is not None
    values = kernels.unpacked(q.codes, q.block_scale, size, q.spec.block_format.scale == "e8m0")
    return ExactOperand(values, q.global_scale, 1, q.spec)


def _checked(x: Tensor, wanted: Sequence[Wanted]) -> Tensor:
    """x with unit stride along its rows. Raises ValueError where the kernels cannot do what is wanted."""
    if reason := why_not_fused(x, wanted):
        raise ValueError(f"fused quantization: {reason}. Use the reference backend.")
    return x if x.stride(1) == 1 else x.contiguous()


def _by_axis(wanted: Sequence[Wanted]) -> tuple[Wanted | None, Wanted | None]:
    """(row operand, column operand)."""
    found = {want.axis: want for want in wanted}
    return found.get(1), found.get(0)


def _packed_of(x: Tensor, want: Wanted, swizzled: bool) -> tuple[Tensor, Tensor, Tensor]:
    if _turns(want):  # what is stored has no layout of x
        return _packed(x.t().contiguous(), want._replace(axis=0), swizzled)
    return _packed(x, want, swizzled)


def _packed(x: Tensor, want: Wanted, swizzled: bool) -> tuple[Tensor, Tensor, Tensor]:
    made, key = plan(want.spec, want.axis, packed=True), _noise_key(want)
    row = want.axis == 1
    amaxes = _amaxes(
        x, (want, None) if row else (None, want), (made, None) if row else (None, made), None if row else key
    )
    return kernels.packed(x, made, amaxes[1 - want.axis], key, swizzled)


def _amaxes(
    x: Tensor,
    wanted: tuple[Wanted | None, Wanted | None],
    plans: tuple[Plan | None, Plan | None],
    key: NoiseKey | None,
) -> tuple[Tensor | None, Tensor | None]:
    """fp32 vectors of maxima for the row and the column plan: those given, the others from one read of x."""
    given = [None if want is None or want.amax is None else want.amax.reshape(-1) for want in wanted]
    row, column = (
        made if made is not None and made.target != 0.0 and have is None else None
        for made, have in zip(plans, given, strict=True)
    )
    if row is None and column is None:
        return given[0], given[1]
    stored = [None if want is None else want.stored for want in wanted]
    parts = kernels.amax_parts(x, row, column, key, (stored[0], stored[1]))
    return given[0] if row is None else parts[0], given[1] if column is None else parts[1]


def _noise_key(want: Wanted | None) -> NoiseKey | None:
    """The key in the form that kernels take. Raises ValueError if bits are to be drawn without one."""
    if want is None:
        return None
    if want.key is not None:
        return want.key if isinstance(want.key, NoiseKey) else NoiseKey(as_sr_key(want.key))
    if want.spec.stochastic or want.spec.signs in ("per-layer", "per-call"):
        raise ValueError(
            f"fused quantization: rounding={want.spec.rounding!r}, rht_signs={want.spec.signs!r} needs a "
            "key, the seed and counter of its random bits."
        )
    return None


def _fp8(x: Tensor, wanted: Sequence[Wanted]) -> tuple[QuantizedTensor, ...]:
    row, column = (None if want is None else fp8_plan(want.spec) for want in _by_axis(wanted))
    row_codes, row_scales, column_codes, column_scales = kernels.fp8(x, row, column)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    shape = (x.shape[0], x.shape[1])
    return tuple(
        QuantizedTensor(
            row_codes if want.axis == 1 else column_codes,
            row_scales if want.axis == 1 else column_scales,
            one,
            want.axis,
            shape,
            want.spec,
        )
        for want in wanted
    )


def _fp8_operand(q: QuantizedTensor) -> ExactOperand:
    """The same numbers in the tensor's layout: views, nothing moves."""
    values = q.codes.view(_FP8_DTYPES[q.spec.format])
    if q.axis == 1:
        return ExactOperand(values, q.block_scale, 1, q.spec)
    return ExactOperand(values.t(), q.block_scale.t(), 0, q.spec)


@functools.cache
def device_blocker(device: torch.device) -> str | None:
    """Why the fused kernels, quantizers and products, do not run on a device, or None."""
    if device.type == "cuda":
        return triton_blocker(probe("rocm" if torch.version.hip else "cuda"))
    if _HAS_TRITON and kernels.INTERPRETED:
        return None
    return f"the fused kernels are for NVIDIA cards, x is on {device.type}"
