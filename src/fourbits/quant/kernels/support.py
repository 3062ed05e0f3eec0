"""What is asked of the fused kernels, and whether they can do it."""

import functools
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.device import facts_of, triton_blocker
from fourbits.quant.kernels.kernel_config import FP8_FORMATS, NoiseKey, obstacle
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.philox import as_sr_key
from fourbits.triton_version import HAS_TRITON

#: whether kernels run in Triton's interpreter, on CPU tensors
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
#: elements from a row to the next for which 32 bits hold every offset within a tile, of at most 128 rows
_LONGEST_ROW = (1 << 24) - 16


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
    if len(wanted) > 1 and any(turns(want) for want in wanted):
        return "a transform along axis 1 is made from a turned copy, so alone"
    length = x.shape[0] if turns(wanted[0]) else x.shape[1]
    if max(length, x.stride(0) if x.stride(1) == 1 else 0) > _LONGEST_ROW:
        return f"rows have more than {_LONGEST_ROW} elements"
    fp8 = {want.spec.format in FP8_FORMATS for want in wanted}
    if len(fp8) > 1:
        return "FP8 and block formats of 4 bits come from different kernels"
    if fp8 == {True} and x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9):
        return "FP8 tensor cores need sm_89 or newer"
    return None


def turns(want: Wanted) -> bool:
    """Whether this operand is made from a turned copy: kernels transform down the rows of a tile."""
    return want.axis == 1 and bool(want.spec.rht)


def checked(x: Tensor, wanted: Sequence[Wanted]) -> Tensor:
    """x with unit stride along its rows. Raises ValueError where the kernels cannot do what is wanted."""
    if reason := why_not_fused(x, wanted):
        raise ValueError(f"fused quantization: {reason}. Use the reference backend.")
    return with_unit_stride(x)


def with_unit_stride(x: Tensor) -> Tensor:
    """x with unit stride along its rows."""
    return x if x.stride(1) == 1 else x.contiguous()


def by_axis(wanted: Sequence[Wanted]) -> tuple[Wanted | None, Wanted | None]:
    """(row operand, column operand)."""
    found = {want.axis: want for want in wanted}
    return found.get(1), found.get(0)


def noise_key(want: Wanted | None) -> NoiseKey | None:
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


@functools.cache
def device_blocker(device: torch.device) -> str | None:
    """Why the fused kernels, quantizers and products, do not run on a device, or None."""
    if device.type == "cuda":
        return triton_blocker(facts_of(device))
    if INTERPRETED:
        return None
    return f"the fused kernels are for NVIDIA cards, x is on {device.type}"
