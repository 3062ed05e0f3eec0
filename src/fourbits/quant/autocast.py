"""Arithmetic that a caller's autocast does not change."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast on the device of x neither rounds operands nor refuses them."""
    return autocast_disabler(x.device)()


def autocast_disabler(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A function that opens the context of `without_autocast` on a device, for repeated use."""
    return (
        nullcontext
        if device.type == "meta"
        else functools.partial(torch.autocast, device.type, enabled=False)
    )
