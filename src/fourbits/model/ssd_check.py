"""Who runs the scan on a device, decided at its first use there: kernels, once they have proved right.

Compilers have given kernels of this kind wrong gradients without a word (fla-org/flash-linear-attention#640).
So before a kernel serves a model, a small scan of the same head dim, state and dtype is compared with the
recurrence in FP64, values and gradients, on the very card, and so are convolution and gated norm around it.
"""

import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fourbits.model.kernel_errors import error_shares
from fourbits.model.mixer_check import convolution_shares, norm_shares
from fourbits.model.ssd_op import ssd_forward, why_no_kernel
from fourbits.model.ssd_reference import ssd as recurrence

NAMES = ("y", "dx", "ddt", "da", "db", "dc", "dd")
#: B, T, H, G: three chunks with a tail, two heads in each of two groups
_SIZES = (1, 150, 4, 2)

#: what was decided: (device, dtype, head dim, state size) -> whether kernels run
_decided: dict[tuple[torch.device, torch.dtype, int, int], bool] = {}


@torch.compiler.assume_constant_result
def is_fused(device: torch.device, dtype: torch.dtype, head_dim: int, state_size: int) -> bool:
    """Whether kernels run scan, convolution and norm of activations in `dtype`, checked when first asked.

    Where an NVIDIA card cannot run them in BF16, one warning says why; FP32 activations are scanned in FP32,
    as on a CPU. Raises RuntimeError if the kernels are wrong, and while a CUDA graph is captured.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    key = (device, dtype, head_dim, state_size)
    if key not in _decided:
        reason = why_no_kernel(*key)
        if reason is None:
            _check(*key)
        else:
            warnings.warn(f"the scan runs as plain torch, in FP32 and slower: {reason}", stacklevel=2)
        _decided[key] = reason is None
    return _decided[key]


def check(device: torch.device, dtype: torch.dtype, head_dim: int, state_size: int) -> dict[str, float]:
    """Error of the mixer's kernels over what BF16 allows, by value and gradient; at most 1 is right."""
    scan = error_shares(NAMES, _scan, recurrence, _arguments(dtype, head_dim, state_size), device)
    return scan | convolution_shares(device, dtype) | norm_shares(device, dtype)


def _scan(*args: Tensor) -> Tensor:
    return ssd_forward(*args, None)


def _check_on(device: torch.device, *key: Any) -> dict[str, float]:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # another thread's is card 0
        return check(device, *key)


def _check(device: torch.device, dtype: torch.dtype, head_dim: int, state_size: int) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the scan's kernels: are checked at their first use, which must not be while a CUDA graph is "
            "captured. Run the model once before."
        )
    # A thread has a state of autograd of its own: no gradients switched off, and no hooks on what is saved,
    # which checkpoints set around a block's forward pass and count by. Only its result comes back.
    with ThreadPoolExecutor(1) as aside:
        shares = aside.submit(_check_on, device, dtype, head_dim, state_size).result()
    wrong = {name: share for name, share in shares.items() if not share <= 1.0}
    if wrong:
        found = ", ".join(f"{name} {share:.3g} times" for name, share in wrong.items())
        raise RuntimeError(
            f"the kernels of Mamba layers, heads of {head_dim} and states of {state_size}: must agree with "
            f"their definitions in FP64, on {device} their error is larger than BF16 allows: {found}. Do not "
            "train with them: another version of Triton may compile them rightly; "
            "compute_dtype FP32 does without them."
        )


def _arguments(dtype: torch.dtype, head_dim: int, state_size: int) -> tuple[Tensor, ...]:
    """x, dt, a, b, c and d, on the CPU; strides of x, b and c as in the model."""
    batch, length, heads, groups = _SIZES
    generator = torch.Generator().manual_seed(0)
    sizes = (heads * head_dim, groups * state_size, groups * state_size)
    both = torch.randn(batch, length, sum(sizes), generator=generator).to(dtype)
    x, b, c = both.split(sizes, -1)
    x, b, c = x.unflatten(-1, (heads, -1)), b.unflatten(-1, (groups, -1)), c.unflatten(-1, (groups, -1))
    dt = torch.rand(batch, length, heads, generator=generator) * 0.2
    a = -torch.rand(heads, generator=generator) - 0.1
    d = torch.rand(heads, generator=generator) + 0.5
    return x, dt, a, b, c, d
