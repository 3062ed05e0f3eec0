"""QuantizedLinear: nn.Linear whose three GEMMs follow a table. Same parameters, state_dict and call."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo import patch_dynamo_config  # pyright: ignore[reportPrivateUsage]

from fourbits.func_transforms import under_torch_func
from fourbits.linear.amax_policy import IN_USE, commit, observe
from fourbits.linear.compute import LinearCall, backward, forward
from fourbits.linear.corrected import Operands
from fourbits.linear.dominant_tokens import measure_first_gradient
from fourbits.linear.flat import autocast_dtype, flattened, rows_of, unflattened, weight_parts
from fourbits.linear.functional import functional_matmul, refuse_transform
from fourbits.linear.graph_products import record_products
from fourbits.linear.layer_state import CallConfig, LayerState, TappedCall
from fourbits.linear.observer import BACKWARD, FORWARD, Observer
from fourbits.linear.operand_cache import SharedInput, shareable
from fourbits.linear.plan import LinearPlan, eager_plan, require_plain
from fourbits.linear.ranks.parallelized import parts_of, require_supported
from fourbits.linear.sr_counter import warn_of_own_steps
from fourbits.linear.traced import linear, once_differentiable, traced_gradients
from fourbits.linear.weight_source import received_weight
from fourbits.quant.quantize import exact
from fourbits.quant.tensor import QuantizedTensor

_last_input = SharedInput()


class EagerCall(NamedTuple):
    """The arguments of an eager call besides the tensors of its autograd function."""

    plan: LinearPlan
    state: LayerState
    #: the layer's input before casts, whose operands sibling layers share; None where they must not
    source: Tensor | None = None
    #: W, if it arrives quantized
    quantized_weight: QuantizedTensor | None = None

    def reuse_input(self, x: Tensor, compute: Callable[[], Operands]) -> Operands:
        """X's operands, reused from a sibling layer that has read the same input, if any."""
        assert self.source is not None
        return _last_input.operands(self.source, self.plan.input.key, compute)

    def reuse_weight(self, weight: Tensor, compute: Callable[[], Operands]) -> Operands:
        """W's operand, reused from an earlier micro-batch where `set_step` allows it."""
        state = self.state
        assert state.counter is not None
        return (state.weight.operand(weight, self.plan.weight.quantize, state.counter, lambda: compute()[0]),)


class _QuantizedMatmul(torch.autograd.Function):
    """The three GEMMs of an eager call, and the updates of counter and recipe state around them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        counter: Tensor,
        amaxes: Tensor | None,
        counters: Tensor | None,
        policy: Tensor | None,
        config: CallConfig,
        eager: EagerCall,
    ) -> Tensor:
        amax = None if amaxes is None else amaxes[config.slot, :, IN_USE].clone()
        counter_used = eager.state.call_counter(x.device, config, x.shape[0])
        y, parts, recorded = _eager_forward(eager, x, weight, bias, counter_used, amax, config)
        if recorded is not None and config.observes and amaxes is not None and counters is not None:
            observe(amaxes, counters, *recorded, config.slot, 0)
        x_saved = x if parts[2] is None else None
        ctx.save_for_backward(x_saved, weight, counter_used, amax, *parts)
        ctx.plan, ctx.state = eager.plan, eager.state  # not the input
        ctx.columns, ctx.config, ctx.counter = x.shape[1], config, counter
        ctx.amaxes, ctx.counters, ctx.policy = amaxes, counters, policy
        call = TappedCall(config.table, counter_used, amax, config.layer, eager.state.feedback.coefficients)
        ctx.tap = eager.state.tapped(x, weight, eager.quantized_weight, call)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counter, amax, *parts = ctx.saved_tensors
        needs, dy = list(ctx.needs_input_grad[:3]), dy.contiguous()
        if ctx.state.awaits_gradient:
            measure_first_gradient(ctx.state, dy)
            record_products(ctx)
        if ctx.tap is not None:
            ctx.tap.backward(dy)
        if not runs_eagerly(dy):
            if ctx.state.weight_returns:
                kept = exact(received_weight(ctx.state, weight))
                parts[:2] = [kept.values, kept.scale]
            present = [part is not None for part in parts]
            saved = [part for part in parts if part is not None]
            grads = traced_gradients(ctx, dy, x, weight, saved, present, counter, amax, needs)
            if ctx.config.counts_itself:
                ctx.state.forget_calls()
        else:
            with torch.no_grad():
                grads = _eager_backward(ctx, dy, x, weight, counter, amax, parts, needs)
            if torch.is_grad_enabled():
                grads = once_differentiable(grads, [dy, weight] if x is None else [dy, x, weight])
        return (*(grad if need else None for grad, need in zip(grads, needs, strict=True)), *[None] * 6)

    jvp = staticmethod(refuse_transform)  # pyright: ignore[reportAssignmentType]


def _eager_forward(
    eager: EagerCall,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counter: Tensor,
    amax: Tensor | None,
    config: CallConfig,
) -> tuple[Tensor, list[Tensor | None], tuple[Tensor, Tensor] | None]:
    """Y, `flattened` operands and recorded stats; may reuse operands that other calls have computed."""
    plan, state = eager.plan, eager.state
    observer = None if amax is None else Observer(plan.table, config.measured, amax, counter, config.layer)
    received = eager.quantized_weight, state.weight_returns, state.feedback.coefficients
    y, saved = forward(
        plan,
        LinearCall(x, weight, counter, config.layer, observer, *received),
        bias,
        None if eager.source is None else eager.reuse_input,
        eager.reuse_weight if state.counter is not None and config.observes else None,
    )
    return y, flattened(saved), None if observer is None else observer.recorded(FORWARD)


def _eager_backward(
    ctx: Any,
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    counter: Tensor,
    amax: Tensor | None,
    parts: list[Tensor | None],
    needs: list[bool],
) -> list[Tensor | None]:
    """The gradients of X, W and bias, None where not needed."""
    plan, config = ctx.plan, ctx.config
    observer = None if amax is None else Observer(plan.table, config.measured, amax, counter, config.layer)
    received = received_weight(ctx.state, weight) if ctx.state.weight_returns and needs[0] else None
    call = LinearCall(x, weight, counter, config.layer, observer, received)
    saved = unflattened(plan.table, parts, (dy.shape[0], ctx.columns))
    grads = backward(plan, call, saved, dy, (needs[0], needs[1], needs[2]))
    if observer is not None and config.observes:
        observe(ctx.amaxes, ctx.counters, *observer.recorded(BACKWARD), config.slot, 2)
    if config.counts_itself:
        _count_step(ctx)
    return list(grads)


def _count_step(ctx: Any) -> None:
    """Advance the layer's own counter, and the recipe state of this layer alone."""
    ctx.counter[1] += 1
    ctx.state.forget_calls()
    warn_of_own_steps()
    if ctx.config.observes and ctx.amaxes is not None:
        commit(ctx.amaxes, ctx.counters, ctx.policy, ctx.counter, ctx.config.slot)


class QuantizedLinear(nn.Linear):
    """An nn.Linear that `convert` has given a table. Created by `convert` only."""

    quantization: LayerState

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in_features] float -> [..., out_features] in nn.Linear's output dtype."""
        state = self.quantization
        if state.runs_original(self.training):
            return state.original.forward(self, input)
        weight = self.weight  # once: a parametrized one is computed, and may draw or count
        if hasattr(weight, "placements"):
            return parallelized_call(self, input, weight)
        if not runs_eagerly(input):
            return traced_call(self, input, weight)
        if input.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"QuantizedLinear: the last dimension of the input must be in_features={self.in_features}, "
                f"got shape {list(input.shape)}. Pass an input of that width."
            )
        config = state.config(self.training, self.training and torch.is_grad_enabled())
        y = eager_matmul(state, config, input, weight, self.bias)
        y = y.view(*input.shape[:-1], self.out_features)
        return y if state.blend is None else blended(self, y, input, weight, config)

    def extra_repr(self) -> str:
        """As nn.Linear, plus the layer's number."""
        return f"{super().extra_repr()}, layer={self.quantization.layer}"


@patch_dynamo_config(allow_unspec_int_on_nn_module=True)
def traced_call(layer: Any, input: Tensor, weight: Tensor) -> Tensor:
    """The call of a layer that something traces. weight: [N, K].

    Blocks that are compiled one by one share code, which from the second block on takes a layer's number as
    an argument. The compiler would otherwise treat a module's integers as constants, and compile every block.
    """
    state = layer.quantization
    if not torch.compiler.is_compiling():
        require_plain(weight)
        require_plain(input)
    config = state.config(layer.training, layer.training)
    y = traced_matmul(state, config, input, weight, layer.bias)
    return y if state.blend is None else blended(layer, y, input, weight, config)


@patch_dynamo_config(allow_unspec_int_on_nn_module=True)
def parallelized_call(layer: Any, input: Tensor, weight: Tensor) -> Tensor:
    """The call of a layer whose weight is a DTensor: see ranks/parallelized.py. Returns a DTensor."""
    state = layer.quantization
    require_supported(state)
    parts = parts_of(layer, weight, input, state.table)
    eager = runs_eagerly(parts.x)
    if eager:
        state.weight.read(weight)
    records = layer.training and (not eager or torch.is_grad_enabled())
    config = parts.config(state.config(layer.training, records))
    compute = eager_matmul if eager else traced_matmul
    y = compute(state, config, parts.x, parts.weight, parts.bias)
    return parts.joined(y.view(*parts.x.shape[:-1], parts.weight.shape[0]))


def blended(layer: Any, y: Tensor, input: Tensor, weight: Tensor, config: CallConfig) -> Tensor:
    """The weighted mean of a layer's output and its output in the other precision of a blending phase.

    Both draw the same random bits: the second call is not counted, and records nothing.
    """
    state, blend = layer.quantization, layer.quantization.blend
    if blend.table is None:
        return blend.mixed(y, state.original.forward(layer, input))
    config = config._replace(table=blend.table, training=False, observes=False)
    if not runs_eagerly(input):
        return blend.mixed(y, traced_matmul(state, config, input, weight, layer.bias))
    other = eager_matmul(state, config, input, weight, layer.bias)
    return blend.mixed(y, other.view(y.shape))


def traced_matmul(
    state: LayerState, config: CallConfig, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Y [..., N], computed by the operators that compilers trace. x: [..., K]."""
    if not torch.compiler.is_compiling() and under_torch_func():
        return functional_matmul(state, config, x, weight, bias)
    counter, recipe_tensors = state.traced_counter_on(x.device), state.recipe_tensors(x.device)
    if state.counts_itself and not config.counts_itself:  # another layer of a group advances it
        counter = counter.clone()
    parts = [] if state.weight_source is None else weight_parts(received_weight(state, weight))
    return linear(
        *(x, weight, bias, counter, *recipe_tensors),
        *(config.layer, config.table, config.measured, config.slot, config.counts_itself, config.training),
        *([] if config.shard is None else list(config.shard), parts, state.feedback.coefficients),
    )


def eager_matmul(
    state: LayerState, config: CallConfig, input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Y [M, N], launched directly. input: [..., K], as passed to the layer."""
    dtype = autocast_dtype(input)
    x, trains, past = rows_of(input), torch.is_grad_enabled(), state.recipe_state is not None
    needs = trains and input.requires_grad, trains and weight.requires_grad
    of_bias = None if bias is None else bias.dtype
    of_weight = weight.dtype, weight.shape, weight.stride(), weight.device
    key = (x.dtype, x.shape, x.stride(), x.device, of_weight, of_bias, dtype, needs, config.table)
    plan, casts = state.plans.get(key) or eager_plan(state.plans, key, x, weight, past)
    received = None if state.weight_source is None else received_weight(state, weight)
    eager = EagerCall(plan, state, input if needs[1] and shareable(input) else None, received)
    counter, recipe_tensors = state.counter_on(x.device), state.recipe_tensors(x.device)
    x = x.to(dtype) if casts else x
    if not (trains or past):
        used = state.call_counter(x.device, config, x.shape[0])
        call = LinearCall(x, weight, used, config.layer, None, received, False, state.feedback.coefficients)
        return forward(plan, call, bias)[0]
    return _QuantizedMatmul.apply(x, weight, bias, counter, *recipe_tensors, config, eager)


def runs_eagerly(x: Tensor) -> bool:
    """Whether nothing traces a call: no compiler, no tensor subclass, no dispatch mode, no transform."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, nn.Parameter) or x.is_meta:
        return False
    if under_torch_func():
        return False
    return torch._C._len_torch_dispatch_stack() == 0  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
