"""BF16 masters: which parameters they are, and how updates smaller than a BF16 step are preserved.

AdamW computes the new weight in FP32 from the old BF16 one. Round to nearest would lose every update below
half a step, so the weight is rounded stochastically, with random bits that depend only on the parameter's
number, the step and the element's position. Matrices (linear layers, embedding) are BF16. Vectors and
convolution taps, a thousandth of the memory, stay FP32. docs/nvfp4.md, section 18.
"""

import torch
from torch import Tensor, nn

from fourbits.quant.cpu.compiled import runner_for
from fourbits.quant.reference.philox import words_at
from fourbits.quant.request import ROLES

#: elements rounded at a time, so that their random bits take at most a few MiB
CHUNK = 1 << 20

_UNIT = 8  # elements per Philox call, 16 bits each
_SIGN, _MAGNITUDE, _INFINITE, _LARGEST = 0x8000, 0x7FFFFFFF, 0x7F80, 0x7F7F


def bf16_masters(model: nn.Module) -> None:
    """Round the model's matrices to BF16, in place; their gradients stay FP32."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.to(torch.bfloat16)
            parameter.grad_dtype = torch.float32


def update_key(seed: int, step: int, index: int) -> tuple[int, int, int, int, int]:
    """The sr_key of a whole parameter's update; entries 3 and 4 are its first row and first eight columns."""
    return (seed, index * len(ROLES) + ROLES.index("update"), step, 0, 0)


@torch.no_grad()
def store_update(master: Tensor, updated: Tensor, key: tuple[int, int, int, int, int]) -> None:
    """Round `updated`, FP32 [R, C], stochastically into `master`, BF16 [R, C]. key: see `update_key`."""
    rows = max(1, CHUNK // max(master.shape[1], 1))
    rounding = runner_for(master)(stochastic_bf16)
    for first in range(0, master.shape[0], rows):
        here = torch.tensor((*key[:3], key[3] + first, key[4]), device=master.device, dtype=torch.int64)
        master[first : first + rows] = rounding(updated[first : first + rows], here)


def stochastic_bf16(z: Tensor, sr_key: Tensor) -> Tensor:
    """Round z, FP32 [R, C], to BF16, away from zero with the probability that makes the mean equal z.

    sr_key: int64 [5]. NaN and infinity are kept; finite values saturate at the largest BF16.
    """
    rows, units = (
        torch.arange(n, device=z.device, dtype=torch.int64) for n in (z.shape[0], -(-z.shape[1] // _UNIT))
    )
    words = words_at(sr_key, rows[:, None], units[None, :], 0)
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -1)
    noise = halves.flatten(1)[:, : z.shape[1]].to(torch.int32)
    pattern = z.view(torch.int32)
    magnitude = ((pattern & _MAGNITUDE) + noise) >> 16
    magnitude = torch.where(magnitude >= _INFINITE, _LARGEST, magnitude)
    signed = torch.where(pattern < 0, magnitude - _SIGN, magnitude).to(torch.int16)
    return torch.where(z.isfinite(), signed.view(torch.bfloat16), z.to(torch.bfloat16))
