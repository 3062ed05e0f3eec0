"""A phase that blends: the weighted mean of a layer's outputs in two precisions.

Its gradients are the weighted means of both backward passes, by autograd. The weight is a tensor that
set_step replaces, so that no step of a blend recompiles a graph.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor


class _Tensors:
    """The weights of all blends, as attributes. A graph reaches them through this object, not a module: see
    sr_counter.py.
    """


_tensors = _Tensors()
_numbers = itertools.count()


def _forget(name: str) -> None:
    if hasattr(_tensors, name):
        delattr(_tensors, name)


class BlendWeight:
    """The share of the other precision, fp32 scalar, shared by the layers that blend on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = f"blend_{next(_numbers)}"
        self.set(0.0)
        weakref.finalize(self, _forget, self.name)

    @torch.inference_mode(mode=False)
    def set(self, value: float) -> None:
        """Replace the tensor; a pending backward pass keeps the old one."""
        tensor = torch.full((), value, dtype=torch.float32, device="cpu")
        if self.device.type == "cuda":  # does not wait for the device
            tensor = tensor.pin_memory()
        setattr(_tensors, self.name, tensor.to(self.device, non_blocking=True))

    @property
    def tensor(self) -> Tensor:
        """The current weight."""
        return getattr(_tensors, self.name)

    def __getstate__(self) -> dict[str, Any]:
        return {"device": self.device, "value": float(self.tensor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        BlendWeight.__init__(self, state["device"])
        self.set(state["value"])


class Blend:
    """The precision that a layer mixes in, a table as text or its original forward (None), and its weight."""

    def __init__(self, table: str | None, weight: BlendWeight, of_phase: bool) -> None:
        """of_phase: whether the weight is that of the phase, or one minus it."""
        self.table, self.weight, self.of_phase = table, weight, of_phase

    def mixed(self, y: Tensor, other: Tensor) -> Tensor:
        """The weighted mean of two outputs of one dtype, in that dtype."""
        share = self.weight.tensor if self.of_phase else 1 - self.weight.tensor
        return torch.lerp(y.float(), other.float(), share).to(y.dtype)
