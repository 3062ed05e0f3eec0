"""The random Hadamard transform (RHT): signs, then a normalised butterfly along the contraction axis.

Applied to both operands of a GEMM it cancels, because H is orthogonal and the signs square to one; what it
changes is the distribution that the quantizer sees. The order of additions is part of the specification:
docs/nvfp4.md, section 9.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fourbits.quant.compiled import with_static_sizes
from fourbits.quant.operand import OperandSpec
from fourbits.quant.philox import SIGN_ROLE, SIGN_WORD, philox

Runner = Callable[[Callable[..., Any]], Callable[..., Any]]

#: the sign vector of TransformerEngine and torchao (numerics as recorded from TransformerEngine d0067d0)
TE16_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def transformed(x: Tensor, spec: OperandSpec, axis: int, sr_key: Tensor | None, run: Runner) -> Tensor:
    """The transform of x along axis, bf16 of its shape. x: floats, spec.rht divides its extent along axis."""
    signs = sign_vector(spec, sr_key, x.device)
    x = x.to(torch.bfloat16)  # before the compiled part, where a cast there and back may be dropped
    if axis == 0:
        lanes = x.reshape(x.shape[0] // spec.rht, spec.rht, x.shape[1])
    else:
        lanes = x.reshape(x.numel() // spec.rht, spec.rht)
    return run(butterfly)(with_static_sizes(lanes, 1), signs).reshape(x.shape)


def butterfly(lanes: Tensor, signs: Tensor | None) -> Tensor:
    """The transform along dimension 1, bf16. lanes: bf16 [.., size, ..]; signs: fp32 [size] of +-1, or None.

    fp32 additions in stages 1, 2, 4, ...; one multiplication by size**-0.5; one rounding to bf16.
    """
    size = lanes.shape[1]
    lane = [x.to(torch.float32) for x in lanes.unbind(1)]
    if signs is not None:
        lane = [x * sign for x, sign in zip(lane, signs.unbind(), strict=True)]
    stride = 1
    while stride < size:
        for i in range(size):
            if not i & stride:
                lane[i], lane[i + stride] = lane[i] + lane[i + stride], lane[i] - lane[i + stride]
        stride *= 2
    scale = torch.tensor(1.0 / math.sqrt(size), dtype=torch.float32).item()
    return torch.stack([(x * scale).to(torch.bfloat16) for x in lane], dim=1)


def sign_vector(spec: OperandSpec, sr_key: Tensor | None, device: torch.device) -> Tensor | None:
    """The +-1 vector of spec's transform, fp32 [rht] on device; None for `none`. docs/nvfp4.md, section 9.

    sr_key: int64 [5], needed by per-layer and per-call signs; ValueError without it.
    """
    if spec.signs == "none":
        return None
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
