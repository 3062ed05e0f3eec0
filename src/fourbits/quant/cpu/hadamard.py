"""The Hadamard transform of the reference in an order that suits compiled CPU code; equal bits.

The compiler keeps up to sixteen elements in registers when they are separate slices, so the butterfly is
unrolled over slices. docs/nvfp4.md, section 9.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fourbits.quant.cpu.compiled import compiled, with_static_sizes
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.hadamard import FACTORS, sign_vector

#: strides 1, 2, 4 and 8 mix sixteen neighbours; the later ones mix such sixteens
_NEIGHBOURS = 16
#: axis 1 is transposed in this many batches, if it divides the groups; threads share them
_BATCHES = 64
#: elements whose intermediate results stay in the cache
_PART = 1 << 21


def transformed(x: Tensor, spec: OperandSpec, axis: int, sr_key: Tensor | None) -> Tensor:
    """The transform of x along axis, bf16 of its shape; arguments as for the reference's `transformed`.

    Compiled code works on [groups, size, length], so axis 1 is transposed before and after.
    """
    size = spec.rht
    signs = sign_vector(spec, sr_key, x.device)
    x = x.to(torch.bfloat16)  # outside of what is compiled: a compiler may drop a cast there and back
    if axis == 0:
        groups = x.reshape(x.shape[0] // size, size, x.shape[1])
        return _transformed_groups(groups, signs).reshape(x.shape)
    count = x.numel() // size
    batches = math.gcd(count, _BATCHES)
    rows = x.reshape(batches, count // batches, size)
    groups = compiled(transposed)(with_static_sizes(rows, 2))
    groups = _transformed_groups(groups, signs)
    return compiled(transposed)(with_static_sizes(groups, 1)).reshape(x.shape)


def _transformed_groups(groups: Tensor, signs: Tensor) -> Tensor:
    """The transform of [groups, size, length]: at once up to 16, else in two passes, part by part."""
    size = groups.shape[1]
    if size <= _NEIGHBOURS:
        return compiled(unrolled_butterfly)(with_static_sizes(groups, 1), signs)
    split = size // _NEIGHBOURS, _NEIGHBOURS
    result = torch.empty_like(groups, dtype=torch.bfloat16)
    parts = max(1, min(groups.numel() // _PART, groups.shape[0] // 2))
    for part, out in zip(groups.tensor_split(parts), result.tensor_split(parts), strict=True):
        within = compiled(short_strides)(with_static_sizes(part.unflatten(1, split), 1, 2), signs.view(split))
        out = with_static_sizes(out.unflatten(1, split), 1, 2)
        compiled(long_strides)(with_static_sizes(within, 1, 2), out)
    return result


def unrolled_butterfly(groups: Tensor, signs: Tensor) -> Tensor:
    """The reference's `butterfly`. groups: bf16 [G, size, L]; signs: fp32 [size] -> bf16."""
    size = groups.shape[1]
    return torch.stack([_scaled(z, size) for z in _all_strides(_signed(groups, signs).unbind(1))], 1)


def short_strides(groups: Tensor, signs: Tensor) -> Tensor:
    """Strides 1 to 8. groups: bf16 [G, k, 16, L]; signs: fp32 [k, 16] -> fp32, not scaled yet."""
    return torch.stack(_all_strides(_signed(groups, signs).unbind(2)), 2)


def long_strides(groups: Tensor, out: Tensor) -> None:
    """Strides from 16 on, of the result of `short_strides`, into out: bf16 of groups' shape."""
    size = groups.shape[1] * groups.shape[2]
    out.copy_(torch.stack([_scaled(z, size) for z in _all_strides(groups.unbind(1))], 1))


def transposed(x: Tensor) -> Tensor:
    """The transposes, contiguous: [B, L, size] -> [B, size, L], and back."""
    return x.transpose(1, 2).contiguous()


def _signed(x: Tensor, signs: Tensor) -> Tensor:
    return x.to(torch.float32) * signs[..., None]


def _all_strides(slices: Sequence[Tensor]) -> list[Tensor]:
    """Sums and differences of slices one apart, two apart, four apart, ..."""
    z, stride = list(slices), 1
    while stride < len(z):
        for i in range(len(z)):
            if not i & stride:
                z[i], z[i + stride] = z[i] + z[i + stride], z[i] - z[i + stride]
        stride *= 2
    return z


def _scaled(z: Tensor, size: int) -> Tensor:
    return (z * FACTORS[size]).to(torch.bfloat16)
