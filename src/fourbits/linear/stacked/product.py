"""The product of experts' rows with their weights: eager, or as operators where something traces the call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fourbits.func_transforms import refuse_every_transform, under_torch_func
from fourbits.linear.dominant_tokens import measure_first_gradient
from fourbits.linear.flat import autocast
from fourbits.linear.graph_products import record_products
from fourbits.linear.layer_state import CallConfig, LayerState
from fourbits.linear.module import runs_eagerly
from fourbits.linear.sr_counter import after_tokens, tick, warn_of_own_steps
from fourbits.linear.stacked import fused, loop
from fourbits.linear.stacked.layer import StackedLayer, local_experts
from fourbits.linear.stacked.loop import GroupedCall
from fourbits.linear.stacked.ops import experts_backward, experts_forward, gradients
from fourbits.linear.traced import once_differentiable
from fourbits.linear.traced_calls import tokens_before
from fourbits.operators import operator


def multiply(
    layer: StackedLayer,
    x: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    transposed: bool | None = None,
    counts: Sequence[int] | None = None,
) -> Tensor:
    """Y [M, N] in nn.Linear's output dtype; rows past the last offset are not defined.

    x: [M, K], the rows of expert 0 first; offsets: int [E + 1] on x's device, where each expert's rows begin
    and end; bias: [E, N]; transposed: whether W is [E, K, N], as the layer has it if None; counts: the rows
    of each expert where the host knows them. Raises ValueError for an x of another width.
    """
    state, module = layer.quantization, layer.module
    weight, first = layer.experts_here()
    bias = None if bias is None else local_experts(bias, f"the bias of {layer.parameter}")[0]
    transposed = layer.transposed if transposed is None else transposed
    if x.dim() != 2 or x.shape[1] != weight.shape[1 if transposed else 2]:
        raise ValueError(
            f"experts: the input must be [rows, {weight.shape[1 if transposed else 2]}] for the weight "
            f"{layer.parameter} {list(weight.shape)}, got {list(x.shape)}. Pass rows of that width."
        )
    return grouped_product(state, module.training, x, weight, bias, offsets, transposed, counts, first)


def grouped_product(
    state: LayerState,
    training: bool,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    transposed: bool,
    counts: Sequence[int] | None = None,
    first: int = 0,
) -> Tensor:
    """As `multiply`, for the state of a layer or a group. first: place of the first of these experts."""
    if not torch.compiler.is_compiling() and under_torch_func():
        refuse_every_transform("experts in one parameter")
    if state.weight_source is None and not runs_eagerly(x):
        config = _from(state.config(training, training), first)
        counter = state.traced_counter_on(x.device)
        return experts(
            *(x, weight, bias, offsets, counter),
            *(config.layer, config.table, transposed, config.counts_itself, config.training),
        )
    config = _from(state.config(training, training and torch.is_grad_enabled()), first)
    x = autocast(x)
    if state.weight_source is not None or fused.unsupported(config.table, x.dtype, weight) is not None:
        counts = loop.counts_of(offsets) if counts is None else counts
        return loop.each(state, config, x, weight, bias, counts, transposed)
    counters = state.group_counters(x.device, config, offsets)
    x = x.contiguous()
    call = GroupedCall(x, weight, bias, offsets, counters, config.layer, config.table, transposed)
    state.called = True
    if not torch.is_grad_enabled():
        return fused.forward(call, (False, False), fused.reused_weight(state, config))[0]
    y: Any = _Experts.apply(x, weight, bias, state.counter_on(x.device), call, config, state)
    return y


def _from(config: CallConfig, first: int) -> CallConfig:
    """The configuration of a call of the experts from `first` on."""
    return config._replace(layer=config.layer + first) if first else config


class _Experts(torch.autograd.Function):
    """The three GEMMs of experts, launched directly."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        counter: Tensor,
        call: GroupedCall,
        config: CallConfig,
        state: LayerState,
    ) -> Tensor:
        needs = ctx.needs_input_grad[:2]
        y, saved = fused.forward(call, needs, fused.reused_weight(state, config))
        ctx.save_for_backward(None, weight, call.offsets, call.counters, *saved)
        ctx.of_call = call.layer, call.table, call.transposed
        ctx.counts_itself, ctx.counter, ctx.state = config.counts_itself, counter, state
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.state.awaits_gradient:
            measure_first_gradient(ctx.state, dy)
            record_products(ctx)
        grads = _backward(ctx, dy.contiguous(), gradients if runs_eagerly(dy) else _traced_gradients)
        if ctx.counts_itself:
            ctx.counter[1] += 1
            ctx.state.forget_calls()
            warn_of_own_steps()
        return (*grads, *[None] * 4)


@operator(
    "experts(Tensor x, Tensor weight, Tensor? bias, Tensor offsets, Tensor(a!) counter, SymInt layer, "
    "str table, bool transposed, bool counts_itself, bool training) -> Tensor"
)
def experts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    counter: Tensor,
    layer: int,
    table: str,
    transposed: bool,
    counts_itself: bool,
    training: bool,
) -> Tensor:
    """A call of experts that something traces: [M, K] -> [M, N]. counter: as in LayerState."""
    first = tokens_before(counter, layer, table, training, offsets.diff().long())
    y: Any = _TracedExperts.apply(
        *(autocast(x).contiguous(), weight.contiguous(), bias, offsets, counter),
        *(first, layer, table, transposed, counts_itself and training),
    )
    return y


class _TracedExperts(torch.autograd.Function):
    """The three GEMMs of experts as operators, and the update of their counter."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offsets: Tensor,
        counter: Tensor,
        first: Tensor | None,
        layer: int,
        table: str,
        transposed: bool,
        counts_itself: bool,
    ) -> Tensor:
        used = (counter.clone() if counts_itself else counter)[None]
        used = used if first is None else after_tokens(used, first)
        needs = [bool(need) for need in ctx.needs_input_grad[:2]]
        y, *saved = experts_forward(x, weight, bias, offsets, used, layer, table, transposed, needs)
        # the operands that grouped kernels save replace x
        ctx.save_for_backward(None if saved else x, weight, offsets, used, *saved)
        ctx.of_call = layer, table, transposed
        ctx.counts_itself, ctx.counter = counts_itself, counter
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        grads = _backward(ctx, dy.contiguous(), _traced_gradients)
        if ctx.counts_itself:
            tick(ctx.counter)
        return (*grads, *[None] * 7)


def _backward(ctx: Any, dy: Tensor, compute: Callable[..., list[Tensor | None]]) -> list[Tensor | None]:
    """The gradients of X, W and bias, None where not needed."""
    x, weight, offsets, counters, *saved = ctx.saved_tensors
    layer, table, transposed = ctx.of_call
    call = GroupedCall(x, weight, None, offsets, counters, layer, table, transposed)
    with torch.no_grad():
        grads = compute(call, dy, saved, list(ctx.needs_input_grad[:3]))
    return once_differentiable(grads, [dy, weight]) if torch.is_grad_enabled() else grads


def _traced_gradients(
    call: GroupedCall, dy: Tensor, saved: Sequence[Tensor], needs: list[bool]
) -> list[Tensor | None]:
    """The gradients of X, W and bias, computed by the operator."""
    tensors = (dy, call.x, call.weight, call.offsets, call.counters, list(saved))
    found = iter(experts_backward(*tensors, call.layer, call.table, call.transposed, needs))
    return [next(found) if need else None for need in needs]
