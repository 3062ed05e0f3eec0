"""The random Hadamard transform (RHT): signs, then a normalised butterfly along the contraction axis.

Applied to both operands of a GEMM it cancels, because H is orthogonal and the signs square to one; what it
changes is the distribution that the quantizer sees. The order of additions is part of the specification:
docs/nvfp4.md, section 9.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fourbits.quant.cpu.compiled import Runner, with_static_sizes
from fourbits.quant.operand import OperandSpec
from fourbits.quant.operand_rules import RHT_SIZES
from fourbits.quant.reference.philox import SIGN_ROLE, SIGN_WORD, philox

#: fp32(size**-0.5)
_FACTORS = {size: torch.tensor(size**-0.5, dtype=torch.float32).item() for size in RHT_SIZES if size}
#: stages 1, 2, 4 and 8 mix sixteen neighbours; the later ones mix such sixteens
_FIRST_STAGES = 16
#: rows along the contraction are turned in so many batches, if they divide by it; threads share them
_BATCHES = 64
#: elements whose intermediate results stay in the cache
_PART = 1 << 21

#: the sign vector of TransformerEngine and torchao (numerics as recorded from TransformerEngine d0067d0)
TE16_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def transformed(x: Tensor, spec: OperandSpec, axis: int, sr_key: Tensor | None, run: Runner) -> Tensor:
    """The transform of x along axis, bf16 of its shape. x: floats, spec.rht divides its extent along axis.

    run: what runs the stages. They work on [groups, size, length], so axis 1 is turned before and after.
    """
    size = spec.rht
    signs = sign_vector(spec, sr_key, x.device)
    x = x.to(torch.bfloat16)  # outside of what is compiled: a compiler may drop a cast there and back
    if axis == 0:
        lanes = x.reshape(x.shape[0] // size, size, x.shape[1])
        return _run_stages(lanes, signs, run).reshape(x.shape)
    count = x.numel() // size
    batches = math.gcd(count, _BATCHES)
    rows = x.reshape(batches, count // batches, size)
    lanes = run(turned)(with_static_sizes(rows, 2))
    return run(turned)(with_static_sizes(_run_stages(lanes, signs, run), 1)).reshape(x.shape)


def _run_stages(lanes: Tensor, signs: Tensor, run: Runner) -> Tensor:
    """All stages on [groups, size, length]: at once up to 16, else in two, part by part for the cache."""
    size = lanes.shape[1]
    if size <= _FIRST_STAGES:
        return run(butterfly)(with_static_sizes(lanes, 1), signs)
    rows = size // _FIRST_STAGES, _FIRST_STAGES
    result = torch.empty_like(lanes, dtype=torch.bfloat16)
    parts = max(1, min(lanes.numel() // _PART, lanes.shape[0] // 2))
    for part, out in zip(lanes.tensor_split(parts), result.tensor_split(parts), strict=True):
        within = run(first_stages)(with_static_sizes(part.unflatten(1, rows), 1, 2), signs.view(rows))
        run(last_stages)(with_static_sizes(within, 1, 2), with_static_sizes(out.unflatten(1, rows), 1, 2))
    return result


def butterfly(lanes: Tensor, signs: Tensor) -> Tensor:
    """The transform along dimension 1. lanes: bf16 [G, size, L]; signs: fp32 [size] -> bf16.

    fp32 additions in stages 1, 2, 4, ...; one multiplication by size**-0.5; one rounding to bf16.
    """
    size = lanes.shape[1]
    return torch.stack([_finished(lane, size) for lane in _stages(_signed(lanes, signs).unbind(1))], 1)


def first_stages(groups: Tensor, signs: Tensor) -> Tensor:
    """Stages 1 to 8. groups: bf16 [G, k, 16, L]; signs: fp32 [k, 16] -> fp32, not scaled yet."""
    return torch.stack(_stages(_signed(groups, signs).unbind(2)), 2)


def last_stages(groups: Tensor, out: Tensor) -> None:
    """Stages from 16 on, of what `first_stages` gives, into out: bf16 of groups' shape."""
    size = groups.shape[1] * groups.shape[2]
    out.copy_(torch.stack([_finished(lane, size) for lane in _stages(groups.unbind(1))], 1))


def turned(x: Tensor) -> Tensor:
    """The transposes, contiguous: [B, L, size] -> [B, size, L], and back."""
    return x.transpose(1, 2).contiguous()


def _signed(x: Tensor, signs: Tensor) -> Tensor:
    return x.to(torch.float32) * signs[..., None]


def _stages(lanes: Sequence[Tensor]) -> list[Tensor]:
    """Sums and differences of lanes one apart, two apart, four apart, ..."""
    lane, stride = list(lanes), 1
    while stride < len(lane):
        for i in range(len(lane)):
            if not i & stride:
                lane[i], lane[i + stride] = lane[i] + lane[i + stride], lane[i] - lane[i + stride]
        stride *= 2
    return lane


def _finished(lane: Tensor, size: int) -> Tensor:
    return (lane * _FACTORS[size]).to(torch.bfloat16)


def sign_vector(spec: OperandSpec, sr_key: Tensor | None, device: torch.device) -> Tensor:
    """The +-1 vector of spec's transform, fp32 [rht] on device. docs/nvfp4.md, section 9.

    sr_key: int64 [5], needed by per-layer and per-call signs; ValueError without it.
    """
    if spec.signs == "none":
        return _constant_signs((1,) * spec.rht, device)
    if spec.signs == "te16":
        return _constant_signs(TE16_SIGNS, device)
    if spec.signs.startswith("fixed:"):
        return _fixed_signs(int(spec.signs.removeprefix("fixed:")), spec.rht, device)
    if sr_key is None:
        raise ValueError(
            f"OperandSpec.rht_signs={spec.signs!r} needs sr_key, which names the layer and the step."
        )
    seed, stream, step = sr_key[0], sr_key[1], sr_key[2]
    layer, gemm = stream >> 3, (stream & 7) >> 1
    zero = torch.zeros_like(step)
    per_call = spec.signs == "per-call"
    counter = (step if per_call else zero, gemm, zero + int(per_call), zero + SIGN_WORD)
    return _signs(philox(counter, (seed, layer * 8 + SIGN_ROLE)), spec.rht)


@functools.cache
def _constant_signs(signs: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(signs, dtype=torch.float32, device=device)


@functools.cache
def _fixed_signs(seed: int, size: int, device: torch.device) -> Tensor:
    word = [torch.tensor(value, dtype=torch.int64) for value in (0, 0, 0, SIGN_WORD)]
    key = torch.tensor(seed, dtype=torch.int64), torch.tensor(SIGN_ROLE, dtype=torch.int64)
    return _signs(philox((word[0], word[1], word[2], word[3]), key), size).to(device)


def _signs(words: tuple[Tensor, ...], size: int) -> Tensor:
    """Minus where bit i % 32 of word i // 32 is set."""
    bits = torch.stack([(words[i // 32] >> (i % 32)) & 1 for i in range(size)])
    return 1.0 - 2.0 * bits.to(torch.float32)
