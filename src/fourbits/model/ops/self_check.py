"""Whether a device runs the ops by kernels: decided at first use, once the kernels have proved correct there.

Compilers have silently produced wrong gradients from kernels of this kind
(fla-org/flash-linear-attention#640). So before kernels serve a model, a small SSD scan with the same head
dim, state size and dtype is compared with the recurrence in FP64, values and gradients, on the GPU in use.
Convolution and gated norm are checked with it.
"""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fourbits.model.ops.conv.op import KERNEL_TAPS, conv_silu
from fourbits.model.ops.errors import error_shares
from fourbits.model.ops.gated_norm.op import gated_group_norm
from fourbits.model.ops.ssd.op import ssd_forward, unsupported
from fourbits.model.ops.ssd.reference import ssd as recurrence

_SCAN = ("y", "dx", "ddt", "da", "db", "dc", "dd")
_CONV = ("convolution's y", "convolution's dx", "dtaps", "dbias")
_NORM = ("norm's output", "norm's dy", "norm's dz", "norm's dweight")
#: B, T, H, G of the scan: three chunks with a tail, two heads in each of two groups
_SCAN_SIZES = (1, 150, 4, 2)
#: B, T and channels of convolution and norm: several programs of each kernel, and tails
_SIZES = (2, 150, 304)
_NORM_GROUPS, _NORM_EPS = 2, 1e-5

#: (device, dtype, head dim, state size) -> whether kernels run
_decisions: dict[tuple[torch.device, torch.dtype, int, int], bool] = {}


@torch.compiler.assume_constant_result
def use_kernels(device: torch.device, dtype: torch.dtype, head_dim: int, state_size: int) -> bool:
    """Whether kernels run SSD scan, convolution and norm on activations in `dtype`; checked at first use.

    If a GPU cannot run the kernels in BF16, one warning says why. FP32 activations are scanned in FP32, as on
    a CPU. Raises RuntimeError if the kernels are wrong, and while a CUDA graph is being captured.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    key = (device, dtype, head_dim, state_size)
    if key not in _decisions:
        reason = unsupported(*key)
        if reason is None:
            _require_correct(*key)
        else:
            warnings.warn(f"the SSD scan runs in plain PyTorch, in FP32 and slower: {reason}", stacklevel=2)
        _decisions[key] = reason is None
    return _decisions[key]


def check(device: torch.device, dtype: torch.dtype, head_dim: int, state_size: int) -> dict[str, float]:
    """Errors of the kernels as shares of what BF16 allows, by value and gradient; at most 1 is correct."""
    parts = checks(device, dtype, head_dim, state_size)
    return {name: share for part in parts.values() for name, share in part().items()}


def checks(
    device: torch.device, dtype: torch.dtype, head_dim: int, state_size: int
) -> dict[str, Callable[[], dict[str, float]]]:
    """The parts of `check` by op. None needs another, so they may run in parallel."""

    def scan() -> dict[str, float]:
        return error_shares(_SCAN, _scan, recurrence, _scan_arguments(dtype, head_dim, state_size), device)

    return {
        "scan": scan,
        "convolution": partial(_conv_shares, device, dtype),
        "norm": partial(_norm_shares, device, dtype),
    }


def _scan(*args: Tensor) -> Tensor:
    return ssd_forward(*args, None)


def _scan_arguments(dtype: torch.dtype, head_dim: int, state_size: int) -> tuple[Tensor, ...]:
    """x, dt, a, b, c and d, on the CPU; strides of x, b and c as in the model."""
    batch, length, heads, groups = _SCAN_SIZES
    generator = torch.Generator().manual_seed(0)
    sizes = (heads * head_dim, groups * state_size, groups * state_size)
    xbc = torch.randn(batch, length, sum(sizes), generator=generator, dtype=torch.float32, device="cpu").to(
        dtype
    )
    x, b, c = xbc.split(sizes, -1)
    x, b, c = x.unflatten(-1, (heads, -1)), b.unflatten(-1, (groups, -1)), c.unflatten(-1, (groups, -1))
    dt = torch.rand(batch, length, heads, generator=generator, dtype=torch.float32, device="cpu") * 0.2
    a = -torch.rand(heads, generator=generator, dtype=torch.float32, device="cpu") - 0.1
    d = torch.rand(heads, generator=generator, dtype=torch.float32, device="cpu") + 0.5
    return x, dt, a, b, c, d


def _conv_shares(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    x, taps, bias = _random((_SIZES, (KERNEL_TAPS, _SIZES[2]), _SIZES[2:]))

    def conv(x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        (y,) = conv_silu(x, taps, bias, None, _SIZES[2:], fused=x.dtype == dtype)
        return y

    return error_shares(_CONV, conv, conv, (x.to(dtype), taps, bias), device)


def _norm_shares(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    y, z, weight = _random((_SIZES, _SIZES, _SIZES[2:]))

    def norm(y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        return gated_group_norm(y, z, weight, _NORM_GROUPS, _NORM_EPS, fused=y.dtype == dtype)

    return error_shares(_NORM, norm, norm, (y.to(dtype), z.to(dtype), weight), device)


def _random(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes]


def _check_on(device: torch.device, *key: Any) -> dict[str, float]:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # a new thread is on GPU 0
        return check(device, *key)


def _require_correct(device: torch.device, dtype: torch.dtype, head_dim: int, state_size: int) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the kernels of Mamba layers are checked at their first use, which must not be during the "
            "capture of a CUDA graph. Run the model once before the capture."
        )
    # A new thread has its own autograd state: gradients are on, and there are no hooks on saved tensors,
    # which activation checkpointing sets around a block's forward pass and counts.
    with ThreadPoolExecutor(1) as thread:
        shares = thread.submit(_check_on, device, dtype, head_dim, state_size).result()
    wrong = {name: share for name, share in shares.items() if not share <= 1.0}
    if wrong:
        found = ", ".join(f"{name} {share:.3g} times" for name, share in wrong.items())
        raise RuntimeError(
            f"the kernels of Mamba layers with heads of {head_dim} and states of {state_size} must agree "
            f"with their FP64 definitions; on {device} their error is larger than BF16 allows: {found}. Do "
            "not train with them. Install another version of Triton, or set compute_dtype to FP32, which "
            "does not use them."
        )
