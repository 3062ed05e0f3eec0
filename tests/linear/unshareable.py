"""Layers that ranks cannot share, and the errors that their calls raise."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.recipe.presets import get_recipe
from fourbits.settings import override


class Layer(nn.Sequential):
    """A converted layer of K input and N output features."""

    def __init__(self, K: int, N: int, recipe: str = "nvfp4", **changes: Any) -> None:
        super().__init__(nn.Linear(K, N))
        self.settings = override(get_recipe(recipe), changes)
        self.x = torch.ones(16, K)

    def sharded(self, mesh: Any, style: Any) -> "Layer":
        parallelize_module(self, mesh, {"0": style})
        return self

    def placed(self, mesh: Any, placement: Any) -> "Layer":
        """With a weight of this placement, of which every rank has its own as its part."""
        layer: Any = self[0]
        layer.weight = nn.Parameter(DTensor.from_local(layer.weight.data, mesh, [placement]))
        layer.bias = None
        return self

    def called(self, x: Any = None) -> Any:
        convert(self, self.settings, include=["0"])
        set_step(self, 1)
        return self(self.x if x is None else x)


def error_of(use: Callable[[], Any]) -> str:
    try:
        use()
    except ValueError as error:
        return str(error)
    return ""


def errors(mesh: Any) -> dict[str, str]:
    """The error of each, on two ranks."""
    by_columns, by_rows = ColwiseParallel(), RowwiseParallel()
    delayed: dict[str, Any] = {"fprop.lhs.amax_policy": "delayed"}
    feedback: dict[str, Any] = {"fprop.lhs.error_feedback": 64}
    whole = distribute_tensor(torch.ones(16, 64), mesh, [Replicate()])
    uses: dict[str, Callable[[], Any]] = {
        "misaligned": lambda: Layer(64, 64, "fp8").sharded(mesh, by_columns).called(),
        "half a block": lambda: Layer(64, 48).sharded(mesh, by_columns).called(),
        "columns": lambda: Layer(48, 64).sharded(mesh, by_rows).called(torch.ones(16, 24)),
        "uneven": lambda: Layer(64, 33).sharded(mesh, by_columns).called(),
        "statistics": lambda: Layer(64, 64, **delayed).sharded(mesh, by_columns).called(),
        "feedback": lambda: Layer(64, 64, **feedback).sharded(mesh, by_columns).called(),
        "blocks of 32": lambda: Layer(64, 32, "mxfp8").sharded(mesh, by_columns).called(),
        "partial": lambda: Layer(64, 64).placed(mesh, Partial()).called(whole),
        "plain input": lambda: Layer(64, 32).placed(mesh, Replicate()).called(),
        "plain weight": lambda: Layer(64, 64).called(whole),
        "width": lambda: Layer(32, 64).placed(mesh, Replicate()).called(whole),
    }
    return {name: error_of(use) for name, use in uses.items()}
