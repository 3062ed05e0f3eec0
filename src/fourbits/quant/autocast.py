"""Arithmetic that a caller's autocast does not change."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast on the device of x neither rounds operands nor refuses them."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
