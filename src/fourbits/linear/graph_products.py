"""The parameters that a step's matrix multiplications read, found in its autograd graph.

The first backward pass of a quantized layer walks over the graph before it, once, so no step pays for a mode
or a hook and no graph breaks. It sees neither into a compiled graph, which is a single node, nor frozen
parameters, which have no node.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

#: nodes of products -> the places of their factors among their inputs
_PRODUCTS = {
    **dict.fromkeys(("MmBackward0", "BmmBackward0", "MvBackward0", "GroupedMmBackward0"), slice(0, 2)),
    **dict.fromkeys(("LinearBackward0", "ConvolutionBackward0"), slice(0, 2)),
    **dict.fromkeys(("AddmmBackward0", "BaddbmmBackward0", "AddbmmBackward0", "AddmvBackward0"), slice(1, 3)),
}
_ATTENTION = "ScaledDotProduct"
_VIEWS = (
    ("T", "Transpose", "View", "UnsafeView", "Reshape", "ReshapeAlias", "Permute", "Expand")
    + ("Unsqueeze", "Squeeze", "Select", "Slice", "ToCopy", "Clone", "Alias", "AsStrided")
    + ("Split", "SplitWithSizes", "Unbind", "Cat", "Stack", "Repeat", "Mt", "Adjoint")
)
#: nodes whose output has the elements of their inputs: views, casts, and joined tensors
_SAME_ELEMENTS = frozenset(f"{name}Backward{number}" for name in _VIEWS for number in range(3))
#: nodes that scale their input, where no other input needs a gradient
_SCALED = frozenset(("MulBackward0", "DivBackward0", "NegBackward0"))
#: parameters that were the only parameter in a product
_multiplied = WeakTensorKeyDictionary()
#: nodes that the current backward pass has visited, by its number
_walked: dict[int, set[Any]] = {}


def record_products(node: Any) -> None:
    """Record the products before the node whose backward runs."""
    task: int = torch._C._current_graph_task_id()  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    if task < 0:
        return
    walked = _walked.get(task)
    if walked is None:
        _walked.clear()
        walked = _walked[task] = set()
        engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore
        engine.queue_callback(_walked.clear)
    _walk(node, walked)


def record_products_of(loss: Tensor) -> None:
    """Record the products from which a tensor was computed."""
    if loss.grad_fn is not None:
        _walk(loss.grad_fn, set())


def was_multiplied(parameter: nn.Parameter) -> bool:
    """Whether a recorded product multiplies by a parameter, with no other parameter as a factor."""
    return parameter in _multiplied


def _walk(node: Any, walked: set[Any]) -> None:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node in walked:
            continue
        walked.add(node)
        before = [edge[0] for edge in node.next_functions]
        name = node.name()
        places = slice(0, 3) if name.startswith(_ATTENTION) else _PRODUCTS.get(name)
        if places is not None:
            sole = [found for factor in before[places] if (found := _parameters(factor))]
            for parameter in sole[0] if len(sole) == 1 else ():
                if not (parameter.dim() > 2 and parameter.shape[1] == 1):  # a kernel for each channel
                    _multiplied[parameter] = True
        waiting += [each for each in before if each is not None]


def _parameters(node: Any) -> list[nn.Parameter]:
    """The parameters whose elements a factor consists of; none if it has others."""
    waiting, found = [node], list[nn.Parameter]()
    while waiting:
        node = waiting.pop()
        if isinstance(variable := getattr(node, "variable", None), nn.Parameter):
            found.append(variable)
        elif node is not None and node.name() in _SAME_ELEMENTS:
            waiting += [edge[0] for edge in node.next_functions]
        elif node is not None and node.name() in _SCALED:
            waiting += [edge[0] for edge in node.next_functions if edge[0] is not None]
        else:
            return []
    return found
