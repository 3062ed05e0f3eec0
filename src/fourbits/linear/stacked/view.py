"""Stacked weights as a module's own forward sees them: views that compute their products.

Products of all experts are torch.nn.functional.grouped_mm (or torch._grouped_mm), bmm, matmul and einsum;
those of one expert are linear, mm, matmul and `@` with `weight[e]`. Casts and transposes give another view.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.variables.torch
from torch import Tensor, nn

from fourbits.linear.stacked.find import order_of_einsum
from fourbits.linear.stacked.layer import StackedLayer
from fourbits.linear.stacked.loop import each
from fourbits.linear.stacked.product import multiply

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class StackedView:
    """A parameter [E, A, B] of a layer, or its transpose [E, B, A]; autograd and casts as the parameter's."""

    def __init__(self, layer: StackedLayer, swapped: bool = False) -> None:
        self.layer, self.swapped = layer, swapped

    @property
    def plain(self) -> Tensor:
        """The tensor that the view stands for, for code that does anything but multiply."""
        weight = self.layer.weight
        return weight.transpose(1, 2) if self.swapped else weight

    def transpose(self, first: int, second: int) -> Any:
        """The view with its last two dimensions exchanged."""
        if {first % 3, second % 3} == {1, 2}:
            return StackedView(self.layer, not self.swapped)
        return self.plain.transpose(first, second)

    @property
    def mT(self) -> "StackedView":  # noqa: N802  # torch's name
        """As torch.Tensor.mT."""
        return StackedView(self.layer, not self.swapped)

    def same(self, *_: Any, **__: Any) -> "StackedView":
        """A cast or a copy changes nothing: operands are quantized from the parameter."""
        return self

    to = bfloat16 = half = float = type_as = contiguous = to_local = same

    def __getitem__(self, place: Any) -> Any:
        """One expert's weight for a whole number, or a tensor of one; else as the parameter."""
        number = isinstance(place, Tensor) and place.dim() == 0 and place.dtype in _INTEGERS
        return OneView(self, int(place)) if number or isinstance(place, int) else self.plain[place]

    def __len__(self) -> int:
        return len(self.layer.experts_here()[0])

    def __iter__(self) -> "Iterator[OneView]":
        return iter(self.unbind())

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """The experts' weights."""
        if dim:
            return self.plain.unbind(dim)
        return tuple(OneView(self, place) for place in range(len(self)))

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def __getattr__(self, name: str) -> Any:
        """Anything else that a tensor has."""
        return getattr(self.plain, name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The product that a function computes, or the function of the parameter itself."""
        kwargs = kwargs or {}
        product = _PRODUCTS.get(getattr(func, "__name__", ""))
        if product is not None:
            found = product(*args, **kwargs)
            if found is not None:
                return found
        return func(*map(_plain, args), **{key: _plain(value) for key, value in kwargs.items()})


class OneView:
    """One expert's weight [A, B], or its transpose."""

    def __init__(self, stack: StackedView, place: int, swapped: bool = False) -> None:
        self.stack, self.place, self.swapped = stack, place, swapped

    @property
    def plain(self) -> Tensor:
        """As StackedView.plain."""
        weight = self.stack.plain[self.place]
        return weight.t() if self.swapped else weight

    def t(self) -> "OneView":
        """The transpose."""
        return OneView(self.stack, self.place, not self.swapped)

    T = property(t)
    mT = property(t)  # noqa: N815  # torch's name

    def transpose(self, first: int, second: int) -> "OneView":
        """The transpose, or the same for equal dimensions."""
        return self.t() if first % 2 != second % 2 else self

    def same(self, *_: Any, **__: Any) -> "OneView":
        """As StackedView.same."""
        return self

    to = bfloat16 = half = float = type_as = contiguous = same

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    __torch_function__ = StackedView.__torch_function__

    def product(self, x: Tensor, out_last: bool, bias: Tensor | None = None) -> Tensor:
        """x [..., K] times this weight. out_last: whether the weight, as this view shows it, is [K, N]."""
        layer = self.stack.layer
        state, module = layer.quantization, layer.module
        transposed = out_last != (self.swapped != self.stack.swapped)
        weight, first = layer.experts_here()
        config = state.config(module.training, module.training and torch.is_grad_enabled())
        config = config._replace(layer=config.layer + first)
        rows = x.reshape(-1, x.shape[-1])
        counts = [0] * len(weight)
        counts[self.place] = len(rows)
        biases = None if bias is None else bias[None].expand(len(counts), -1)
        y = each(state, config, rows, weight, biases, counts, transposed)
        return y.view(*x.shape[:-1], y.shape[-1])


def _plain(value: Any) -> Any:
    if isinstance(value, StackedView | OneView):
        return value.plain
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value


def _grouped_mm(x: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Rows sorted by expert, [M, K] times [E, K, N], as torch's grouped GEMM."""
    if not isinstance(weight, StackedView) or not isinstance(x, Tensor) or bias is not None:
        return None
    if x.dim() == 3:
        return _bmm(x, weight)
    if x.dim() != 2 or offs is None:
        return None
    offsets = torch.nn.functional.pad(offs.to(torch.int32), (1, 0))
    y = multiply(weight.layer, x, offsets, None, not weight.swapped)
    return y if out_dtype is None else y.to(out_dtype)


def _bmm(x: Any, weight: Any) -> Any:
    """As many rows for each expert: [E, C, K] times [E, K, N]."""
    if not isinstance(weight, StackedView) or not isinstance(x, Tensor) or x.dim() != 3:
        return None
    count, rows, width = x.shape
    if count != len(weight):
        return None
    offsets = torch.arange(count + 1, dtype=torch.int32, device=x.device) * rows
    flat = x.reshape(count * rows, width)
    y = multiply(weight.layer, flat, offsets, None, not weight.swapped, [rows] * count)
    return y.view(count, rows, y.shape[1])


def _matmul(x: Any, weight: Any) -> Any:
    if isinstance(weight, StackedView):
        return _bmm(x, weight)
    if isinstance(weight, OneView) and isinstance(x, Tensor) and x.dim():
        return weight.product(x, out_last=True)
    return None


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(weight, OneView) and isinstance(x, Tensor) and x.dim():
        return weight.product(x, out_last=False, bias=bias)
    return None


def _einsum(equation: Any, *operands: Any) -> Any:
    """`ecd,edh->ech` and `ecd,ehd->ech`, in any letters."""
    inner_first = order_of_einsum(equation)
    if inner_first is None or len(operands) != 2 or not isinstance(operands[1], StackedView):
        return None
    return _bmm(operands[0], operands[1] if inner_first else operands[1].mT)


_PRODUCTS: dict[str, Callable[..., Any]] = {
    "_grouped_mm": _grouped_mm,
    "grouped_mm": _grouped_mm,
    "bmm": _bmm,
    "einsum": _einsum,
    "matmul": _matmul,
    "__matmul__": _matmul,
    "mm": _matmul,
    "linear": _linear,
}


def intercept_in_graphs() -> None:
    """Make torch.compile call the views' `__torch_function__` for grouped GEMMs, which its list lacks.

    If PyTorch has no such list, graphs break at these calls, with the same results.
    """
    listed = getattr(torch._dynamo.variables.torch, "get_overridable_functions", set)()
    listed.update(
        function
        for function in (getattr(torch, "_grouped_mm", None), getattr(nn.functional, "grouped_mm", None))
        if function is not None
    )
