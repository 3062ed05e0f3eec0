"""The kernels around the scan, convolution and gated norm, against their definitions, for `ssd_check`."""

import torch
from torch import Tensor

from fourbits.model.conv import KERNEL_TAPS, conv_silu
from fourbits.model.gated_norm import gated_group_norm
from fourbits.model.kernel_errors import error_shares

_CONV = "convolution's y", "convolution's dx", "dtaps", "dbias"
_NORM = "norm's output", "norm's dy", "norm's dz", "norm's dweight"
#: B, T and channels: several programs of each kernel, and tails
_SIZES = 2, 150, 304
_GROUPS, _EPS = 2, 1e-5


def convolution_shares(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Errors of the convolution's kernels over what BF16 allows; at most 1 is right."""
    x, taps, bias = _random((_SIZES, (KERNEL_TAPS, _SIZES[2]), _SIZES[2:]))

    def conv(x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        (y,) = conv_silu(x, taps, bias, None, _SIZES[2:], fused=x.dtype == dtype)
        return y

    return error_shares(_CONV, conv, conv, (x.to(dtype), taps, bias), device)


def norm_shares(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Errors of the gated norm's kernels over what BF16 allows; at most 1 is right."""
    y, z, weight = _random((_SIZES, _SIZES, _SIZES[2:]))

    def norm(y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        return gated_group_norm(y, z, weight, _GROUPS, _EPS, fused=y.dtype == dtype)

    return error_shares(_NORM, norm, norm, (y.to(dtype), z.to(dtype), weight), device)


def _random(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]
