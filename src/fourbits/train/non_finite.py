"""Where the first NaN or infinity came from: a repeated forward pass that checks every module's output."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite. The masters are unchanged since before the step."""


def first_in_forward(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """Name of the first module, in order of computation, whose output is not finite, or None."""
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            if not found and not all(bool(t.isfinite().all()) for t in tensors if isinstance(t, Tensor)):
                found.append(name)

        return hook

    # A module finishes after its submodules, so the innermost one with a non-finite output is found first.
    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # compiled code may not call hooks
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def first_in_backward(names: Sequence[str], norms: Sequence[float]) -> str | None:
    """The parameter whose non-finite gradient was computed first: the last one in forward order."""
    non_finite = [name for name, norm in zip(names, norms, strict=True) if not math.isfinite(norm)]
    return non_finite[-1] if non_finite else None
