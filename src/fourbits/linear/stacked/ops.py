"""Products of experts as operators, for graphs that torch.compile traces.

As linear/ops.py: the implementation is opaque to the compiler, the table is text. How many rows an expert has
is known on the device only, so every output's shape follows from the shapes of the inputs.
"""

from collections.abc import Sequence

from torch import Tensor

from fourbits.linear.dominant_tokens import measure_first_gradient_in_graph
from fourbits.linear.fake_shapes import fake_gradients
from fourbits.linear.ops import calls_seen
from fourbits.linear.stacked import fused, loop
from fourbits.linear.stacked.loop import GroupedCall
from fourbits.operators import operator


def _fake_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    counters: Tensor,
    layer: int,
    table: str,
    transposed: bool,
    needs: list[bool],
) -> list[Tensor]:
    y = x.new_empty((x.shape[0], weight.shape[2 if transposed else 1]))
    if fused.unsupported(table, x.dtype, weight) is not None:
        return [y]
    call = GroupedCall(x, weight, bias, offsets, counters, layer, table, transposed)
    return [y, *fused.fake_saved(call, needs)]


@operator(
    "experts_forward(Tensor x, Tensor weight, Tensor? bias, Tensor offsets, Tensor counters, SymInt layer, "
    "str table, bool transposed, bool[] needs) -> Tensor[]",
    _fake_forward,
)
def experts_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    counters: Tensor,
    layer: int,
    table: str,
    transposed: bool,
    needs: list[bool],
) -> list[Tensor]:
    """Y [M, N] in x's dtype, and the parts of operands that the backward pass will read.

    x: [M, K], contiguous; the others are the fields of a GroupedCall; needs: whether dX and dW will be
    needed.
    """
    call = GroupedCall(x, weight, bias, offsets, counters, layer, table, transposed)
    calls_seen.add((layer, *_sizes(call)))
    if fused.unsupported(table, x.dtype, weight) is not None:
        return [loop.forward(call)]
    y, saved = fused.forward(call, needs)
    return [y, *saved]


def _fake_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    offsets: Tensor,
    counters: Tensor,
    saved: list[Tensor],
    layer: int,
    table: str,
    transposed: bool,
    needs: list[bool],
) -> list[Tensor]:
    return fake_gradients(dy, weight, (dy.shape[0], weight.shape[1 if transposed else 2]), needs)


@operator(
    "experts_backward(Tensor dy, Tensor? x, Tensor weight, Tensor offsets, Tensor counters, Tensor[] saved, "
    "SymInt layer, str table, bool transposed, bool[] needs) -> Tensor[]",
    _fake_backward,
)
def experts_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    offsets: Tensor,
    counters: Tensor,
    saved: list[Tensor],
    layer: int,
    table: str,
    transposed: bool,
    needs: list[bool],
) -> list[Tensor]:
    """The needed gradients among those of x, weight and bias. dy: [M, N], contiguous; x: None where the
    forward pass saved parts of operands.
    """
    call = GroupedCall(x, weight, None, offsets, counters, layer, table, transposed)
    measure_first_gradient_in_graph((layer, *_sizes(call)), table, dy)
    grads = gradients(call, dy, saved, needs)
    return [grad for grad in grads if grad is not None]


def gradients(
    call: GroupedCall, dy: Tensor, saved: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """dX, dW and dbias, None where not needed."""
    if fused.unsupported(call.table, dy.dtype, call.weight) is not None:
        return loop.backward(call, dy, needs)
    return fused.backward(call, dy, saved, needs)


def _sizes(call: GroupedCall) -> tuple[int, int]:
    """(out_features, in_features) of one expert."""
    rows, columns = call.weight.shape[1:]
    return (columns, rows) if call.transposed else (rows, columns)
