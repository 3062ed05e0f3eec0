"""Classes of linear layers that compute what nn.Linear does, so that a converted layer may replace them."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

#: the attribute under which accelerate's hooks keep the forward that they call
_HOOKED = "_old_forward"


@functools.cache
def computes_like_linear(cls: type[nn.Linear]) -> bool:
    """Whether calls of a class return X W^T + b: it declares so, inherits nn.Linear's forward, or gives
    nn.Linear's numbers on a small layer that has no attribute but nn.Linear's.
    """
    if getattr(cls, "casts_weight", False) or cls.forward is nn.Linear.forward:
        return True
    return all(_gives_the_same(cls, bias, training) for bias in (True, False) for training in (True, False))


def _gives_the_same(cls: type[nn.Linear], bias: bool, training: bool) -> bool:
    with torch.no_grad(), torch.device("cpu"):
        values = torch.arange(16 * 48, dtype=torch.float32, device="cpu").reshape(48, 16).sin()
        linear: Any = nn.Linear(16, 24, bias=bias).train(training)
        linear.weight.copy_(values[:24])
        if bias:
            linear.bias.copy_(values[:24, 0])
        expected = linear(values[24:])
        try:
            linear.__class__ = cls
            found: Any = linear(values[24:])
        except Exception:  # noqa: BLE001  # a class that raises anything is no nn.Linear
            return False
    same_kind = (
        type(found) is torch.Tensor and found.shape == expected.shape and found.dtype == expected.dtype
    )
    return same_kind and torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def hides_forward(module: nn.Module) -> bool:
    """Whether the instance has its own forward, which a change of the class would not affect.

    accelerate's hooks are no obstacle: they call a bound method that `rebind` replaces.
    """
    if "forward" not in vars(module) or _is_bound(module, "forward", type(module).forward):
        return False
    return not ("_hf_hook" in vars(module) and _is_bound(module, _HOOKED, type(module).forward))


def rebind(module: nn.Module, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Replace a class's forward by another's where the instance keeps it as a bound method."""
    for name in ("forward", _HOOKED):
        if _is_bound(module, name, old):
            vars(module)[name] = MethodType(new, module)


def _is_bound(module: nn.Module, name: str, forward: Callable[..., Any]) -> bool:
    method = vars(module).get(name)
    return isinstance(method, MethodType) and method.__func__ is forward and method.__self__ is module
