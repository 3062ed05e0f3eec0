"""Transforms of torch.func: whether one is active, and the error of what has no rule for one."""

from collections.abc import Callable
from typing import NoReturn

import torch

#: whether a transform of torch.func is active
under_torch_func: Callable[[], bool] = torch._C._are_functorch_transforms_active  # pyright: ignore


class UnsupportedTransformError(RuntimeError):
    """A transform of torch.func that a function of this package has no rule for."""


def refuse_every_transform(what: str) -> NoReturn:
    """Raises UnsupportedTransformError for what not even torch.func.grad differentiates."""
    raise UnsupportedTransformError(
        f"{what}: transforms of torch.func are not supported, grad and vjp included. Call backward() "
        'instead, or restore the model\'s own layers with fourbits.convert(model, "bf16").'
    )
