"""Any other module with stacked weights, such as torchtitan's: its forward runs, products are intercepted.

While the forward runs, reading the parameter gives a StackedView, whose `__torch_function__` PyTorch's
functions call first. Products with all experts or with one are computed by the table; anything else gets the
parameter itself, in high precision, and fourbits.audit then lists the weight as bypassed.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fourbits.linear.stacked.layer import StackedLayers
from fourbits.linear.stacked.view import StackedView, intercept_in_graphs


class QuantizedStack(nn.Module):
    """A module with stacked weights that `convert` has given tables. Created by `convert` only."""

    quantization: StackedLayers

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run the forward of the module's own class."""
        state = self.quantization
        forward: Callable[..., Any] = state.original.forward
        if state.active or state.runs_original(self.training):
            return forward(self, *args, **named)
        state.active = True
        try:
            return forward(self, *args, **named)
        finally:
            state.active = False


@functools.cache
def viewed(parameter: str) -> property:
    """The attribute that stands for a parameter in the class of a converted module."""
    intercept_in_graphs()

    def read(self: QuantizedStack) -> Tensor | StackedView:
        found = self._parameters[parameter]  # pyright: ignore[reportPrivateUsage]
        state = self.quantization
        layer = state.quantized_now(parameter) if state.active else None
        return found if layer is None else StackedView(layer)  # pyright: ignore[reportReturnType]

    return property(read)
