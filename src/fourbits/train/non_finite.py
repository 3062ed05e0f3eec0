"""Who made the first NaN or infinity: a forward pass again, with a watch on every module."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite. The masters are those before the step."""


def first_in_forward(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """Name of the first module, in the order of computation, whose output is not finite; None if all are."""
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            if not found and not all(bool(t.isfinite().all()) for t in tensors if isinstance(t, Tensor)):
                found.append(name)

        return hook

    # A module finishes after the modules it is made of, so the innermost culprit reports first.
    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # compiled code may not call hooks
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def first_in_backward(names: Sequence[str], norms: Sequence[float]) -> str | None:
    """The parameter whose gradient is not finite and is computed first: the last one of the forward order."""
    poisoned = [name for name, norm in zip(names, norms, strict=True) if not math.isfinite(norm)]
    return poisoned[-1] if poisoned else None
