"""Errors of a kernel on a device against its definition in FP64."""

from collections.abc import Callable

import torch
from torch import Tensor

#: Roundings to BF16 between the inputs and a result, each 2^-9 of a term in the mean square: weights, states,
#: the factors they multiply, the result. Terms have random signs, so the error of a sum is at most of its
#: size.
_ROUNDINGS, _MEAN_ROUNDING = 4, 2.0**-9


def error_shares(
    names: tuple[str, ...],
    kernel: Callable[..., Tensor],
    definition: Callable[..., Tensor],
    args: tuple[Tensor, ...],
    device: torch.device,
) -> dict[str, float]:
    """Error of a value and of its gradients as a share of what BF16 allows, by name; at most 1 is correct.

    kernel: called on `device`; definition: called on the CPU in FP64; args: on the CPU.
    """
    on_device = value_and_gradients(kernel, tuple(arg.to(device) for arg in args))
    exact = value_and_gradients(definition, tuple(arg.double() for arg in args))
    allowed = _ROUNDINGS * _MEAN_ROUNDING
    return {
        name: float(_rms(got.cpu() - true) / (allowed * _rms(true)))
        for name, got, true in zip(names, on_device, exact, strict=True)
    }


def value_and_gradients(function: Callable[..., Tensor], args: tuple[Tensor, ...]) -> list[Tensor]:
    """function(*args) and the gradients of args, for a dy that is exact in BF16 and fixed by y's shape."""
    args = tuple(arg.detach().requires_grad_() for arg in args)
    y = function(*args)
    dy = (
        torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu")
        .bfloat16()
        .to(y)
    )
    return [y.detach(), *torch.autograd.grad(y, args, dy)]


def _rms(x: Tensor) -> Tensor:
    return x.double().square().mean().sqrt()
