"""The random Hadamard transform (RHT): signs, then a normalised butterfly along the contraction axis.

Applied to both operands of a GEMM it cancels, because H is orthogonal and the signs square to one; it changes
only the distribution that the quantizer sees. The order of additions is part of the specification:
docs/nvfp4.md, section 9.
"""

import torch
from torch import Tensor

from fourbits.quant.operand import OperandSpec
from fourbits.quant.operand_rules import RHT_SIZES
from fourbits.quant.reference.philox import SIGN_ROLE, SIGN_WORD, computed_once, philox

#: fp32(size**-0.5)
FACTORS = {
    size: torch.tensor(size**-0.5, dtype=torch.float32, device="cpu").item() for size in RHT_SIZES if size
}

#: the sign vector of TransformerEngine and torchao (numerics as recorded from TransformerEngine d0067d0)
TE16_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def transformed(x: Tensor, spec: OperandSpec, axis: int, sr_key: Tensor | None) -> Tensor:
    """The transform of x along axis, bf16 of its shape. x: floats, spec.rht divides its extent along axis."""
    if not x.numel():
        return x
    signs = sign_vector(spec, sr_key, x.device)
    groups = x.to(torch.bfloat16).reshape(-1, spec.rht, x.shape[1] if axis == 0 else 1)
    return butterfly(groups, signs).reshape(x.shape)


def butterfly(groups: Tensor, signs: Tensor) -> Tensor:
    """The transform along dimension 1. groups: bf16 [G, size, L]; signs: fp32 [size] -> bf16.

    fp32 sums and differences of elements 1, 2, 4, ... apart; one multiplication by size**-0.5; one rounding.
    """
    size, stride = groups.shape[1], 1
    z = groups.to(torch.float32) * signs[:, None]
    while stride < size:
        first, second = z.unflatten(1, (size // (2 * stride), 2, stride)).unbind(2)
        z = torch.stack((first + second, first - second), 2).flatten(1, 3)
        stride *= 2
    return (z * FACTORS[size]).to(torch.bfloat16)


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


@computed_once
def _constant_signs(signs: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(signs, dtype=torch.float32, device=device)


@computed_once
def _fixed_signs(seed: int, size: int, device: torch.device) -> Tensor:
    word = [torch.tensor(value, dtype=torch.int64, device="cpu") for value in (0, 0, 0, SIGN_WORD)]
    key = (
        torch.tensor(seed, dtype=torch.int64, device="cpu"),
        torch.tensor(SIGN_ROLE, dtype=torch.int64, device="cpu"),
    )
    return _signs(philox((word[0], word[1], word[2], word[3]), key), size).to(device)


def _signs(words: tuple[Tensor, ...], size: int) -> Tensor:
    """Minus where bit i % 32 of word i // 32 is set."""
    bits = torch.stack([(words[i // 32] >> (i % 32)) & 1 for i in range(size)])
    return 1.0 - 2.0 * bits.to(torch.float32)
