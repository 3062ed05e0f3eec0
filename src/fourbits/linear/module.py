"""QuantizedLinear: nn.Linear whose three GEMMs follow a table. Same parameters, state_dict and call."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.library import custom_op

from fourbits.linear.amax_policy import IN_USE, commit, observe
from fourbits.linear.compute import LinearCall, backward, forward
from fourbits.linear.functional import NO_SECOND_DERIVATIVE, functional_matmul
from fourbits.linear.health import look_at
from fourbits.linear.layer_state import CallConfig, LayerState, PlanKey
from fourbits.linear.limited_rows import limited, scaled_back
from fourbits.linear.observer import BACKWARD, FORWARD, Observer
from fourbits.linear.operand_cache import SharedInput, shareable
from fourbits.linear.ops import flattened, is_part, linear_backward, linear_forward, unflattened
from fourbits.linear.plan import LinearPlan, linear_plan, reads_through_bf16
from fourbits.quant.quantize import Operand
from fourbits.quant.request import signature_of

#: whether a transform of torch.func is active
under_torch_func: Callable[[], bool] = torch._C._are_functorch_transforms_active  # pyright: ignore
#: dtypes that autocast casts
_CAST = (torch.float32, torch.bfloat16, torch.float16)
#: plans that a layer keeps, which bounds memory where every input has a new shape
_PLANS_KEPT = 256
_warned: list[bool] = []
_last_input = SharedInput()


class EagerCall(NamedTuple):
    """The arguments of an eager call besides the tensors of its autograd function."""

    plan: LinearPlan
    state: LayerState
    #: the layer's input before casts, whose operands sibling layers share; None where they must not
    source: Tensor | None = None

    def reuse_input(self, x: Tensor, compute: Callable[[], tuple[Operand, ...]]) -> tuple[Operand, ...]:
        """X's operands, reused from a sibling layer that has read the same input, if any."""
        assert self.source is not None
        return _last_input.operands(self.source, self.plan.input.quantize, compute)

    def reuse_weight(self, weight: Tensor, compute: Callable[[], tuple[Operand, ...]]) -> tuple[Operand, ...]:
        """W's operand, reused from an earlier micro-batch where `set_step` allows it."""
        state = self.state
        assert state.counter is not None
        return (state.weight.operand(weight, self.plan.weight.quantize, state.counter, lambda: compute()[0]),)


class _QuantizedMatmul(torch.autograd.Function):
    """The three GEMMs, and the updates of the layer's counter and recipe state around them.

    Eager calls run the functions of compute.py; traced graphs run the operators of ops.py around them.
    """

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
        eager: EagerCall | None,
    ) -> Tensor:
        amax = None if amaxes is None else amaxes[config.slot, :, IN_USE].clone()
        if eager is not None:
            counter_used = eager.state.call_counter(x.device, config, x.shape[0])
            outputs = _eager_forward(eager, x, weight, bias, counter_used, amax, config)
        else:
            counter_used = counter.clone() if config.counts_itself else counter
            needs = [bool(need) for need in ctx.needs_input_grad[:2]]
            outputs = linear_forward(
                x, weight, bias, counter_used, amax, config.layer, config.table, config.measured, needs
            )
        y, *parts = outputs[:6]
        assert y is not None
        if config.observes and amaxes is not None and counters is not None:
            observe(amaxes, counters, outputs[6], outputs[7], config.slot, 0)
        x_saved = None if is_part(parts[2]) else x
        ctx.save_for_backward(x_saved, weight, counter_used, amax, *parts)
        ctx.plan, ctx.state = (None, None) if eager is None else (eager.plan, eager.state)  # not the input
        ctx.shape, ctx.config, ctx.counter = (x.shape[0], x.shape[1]), config, counter
        ctx.amaxes, ctx.counters, ctx.policy = amaxes, counters, policy
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counter, amax, *parts = ctx.saved_tensors
        config: CallConfig = ctx.config
        needs, dy = list(ctx.needs_input_grad[:3]), dy.contiguous()
        if ctx.state is not None and ctx.state.awaits_gradient:
            look_at(ctx.state, dy)
        whole, back = dy, None
        if config.limits_rows:
            dy, back = limited(dy)
        with torch.no_grad():
            if ctx.plan is not None and runs_eagerly(dy):
                outputs = _eager_backward(ctx, dy, x, weight, counter, amax, parts, needs)
            else:
                outputs = linear_backward(
                    dy,
                    x,
                    weight,
                    [dy.new_empty(0) if part is None else part for part in parts],
                    counter,
                    amax,
                    list(ctx.shape),
                    config.layer,
                    config.table,
                    config.measured,
                    needs,
                )
            if config.observes and ctx.amaxes is not None:
                observe(ctx.amaxes, ctx.counters, outputs[3], outputs[4], config.slot, 2)
        if config.counts_itself:
            _count_step(ctx)
        grads = outputs[:3]
        if back is not None:
            grads = [scaled_back(grads[0], back), grads[1], whole.sum(0, dtype=torch.float32)]
        if torch.is_grad_enabled():
            sources = [dy, weight] if x is None else [dy, x, weight]
            grads = [grad if grad is None else _FirstDerivative.apply(grad, *sources) for grad in grads]
        return (*(grad if need else None for grad, need in zip(grads, needs, strict=True)), *[None] * 6)


def _eager_forward(
    eager: EagerCall,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counter: Tensor,
    amax: Tensor | None,
    config: CallConfig,
) -> list[Tensor | None]:
    """As `linear_forward`, but may reuse operands that other calls have computed."""
    plan, state = eager.plan, eager.state
    observer = None if amax is None else Observer(plan.table, config.measured, amax, counter, config.layer)
    y, saved = forward(
        plan,
        LinearCall(x, weight, counter, config.layer, observer),
        bias,
        None if eager.source is None else eager.reuse_input,
        eager.reuse_weight if state.counter is not None and config.observes else None,
    )
    return [y, *flattened(saved), *(() if observer is None else observer.recorded(FORWARD))]


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
    """As `linear_backward`, but returns None for gradients that are not needed."""
    plan, config = ctx.plan, ctx.config
    observer = None if amax is None else Observer(plan.table, config.measured, amax, counter, config.layer)
    call = LinearCall(x, weight, counter, config.layer, observer)
    saved = unflattened(plan.table, parts, ctx.shape)
    grads = backward(plan, call, saved, dy, (needs[0], needs[1], needs[2]))
    return [*grads, *(() if observer is None else observer.recorded(BACKWARD))]


def _count_step(ctx: Any) -> None:
    """Advance the layer's own counter, and the recipe state of this layer alone."""
    if ctx.state is None:
        tick(ctx.counter)
    else:
        ctx.counter[1] += 1
        ctx.state.forget_calls()
        _warn_of_own_steps()
    if ctx.config.observes and ctx.amaxes is not None:
        commit(ctx.amaxes, ctx.counters, ctx.policy, ctx.counter, ctx.config.slot)


class _FirstDerivative(torch.autograd.Function):
    """Identity on a gradient computed with create_graph; differentiating it again is an error."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(NO_SECOND_DERIVATIVE)


@custom_op("fourbits::tick", mutates_args={"counter"})
def tick(counter: Tensor) -> None:
    """Advance a layer's own counter by one step, and warn once about the limits of doing so."""
    counter[1] += 1
    _warn_of_own_steps()


@tick.register_fake
def _(counter: Tensor) -> None:
    return None


def _warn_of_own_steps() -> None:
    if not _warned:
        _warned.append(True)
        warnings.warn(
            "fourbits: set_step was never called, so each layer counts its own backward passes. Rounding "
            "noise differs at every step, but it depends on the number of ranks and micro-batches, and a "
            "resumed run does not repeat it. Call fourbits.set_step(model, step) before each micro-batch.",
            stacklevel=3,
        )


class QuantizedLinear(nn.Linear):
    """An nn.Linear that `convert` has given a table. Created by `convert` only."""

    quantization: LayerState

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in_features] float -> [..., out_features] in nn.Linear's output dtype."""
        state = self.quantization
        if not (self.training or state.quantize_eval):
            return state.original.forward(self, input)
        if input.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"QuantizedLinear: the last dimension of the input must be in_features={self.in_features}, "
                f"got shape {list(input.shape)}. Pass an input of that width."
            )
        config = state.config(self.training, self.training and torch.is_grad_enabled())
        if runs_eagerly(input):
            y = eager_matmul(state, config, input, self.weight, self.bias)
        else:
            y = traced_matmul(state, config, rows_of(autocast(input)), self.weight, self.bias)
        return y.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """As nn.Linear, plus the layer's number."""
        return f"{super().extra_repr()}, layer={self.quantization.layer}"


def traced_matmul(
    state: LayerState, config: CallConfig, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Y [M, N], computed by the operators that compilers trace. x: [M, K]."""
    if not torch.compiler.is_compiling() and under_torch_func():
        return functional_matmul(state, config, x, weight, bias)
    counter, recipe_tensors = state.counter_on(x.device), state.recipe_tensors(x.device)
    if state.counts_itself and not config.counts_itself:  # another layer of a group advances it
        counter = counter.clone()
    return _QuantizedMatmul.apply(x, weight, bias, counter, *recipe_tensors, config, None)


def eager_matmul(
    state: LayerState, config: CallConfig, input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Y [M, N], launched directly. input: [..., K], as passed to the layer."""
    dtype = autocast_dtype(input)
    x, trains, past = rows_of(input), torch.is_grad_enabled(), state.book is not None
    needs = trains and input.requires_grad, trains and weight.requires_grad
    of_bias = None if bias is None else bias.dtype
    of_weight = weight.dtype, weight.shape, weight.stride(), weight.device
    key = (x.dtype, x.shape, x.stride(), x.device, of_weight, of_bias, dtype, needs, config.table)
    plan, casts = state.plans.get(key) or _planned(state, key, x, weight)
    eager = EagerCall(plan, state, input if needs[1] and shareable(input) else None)
    counter, recipe_tensors = state.counter_on(x.device), state.recipe_tensors(x.device)
    x = x.to(dtype) if casts else x
    if not (trains or past):
        used = state.call_counter(x.device, config, x.shape[0])
        return forward(plan, LinearCall(x, weight, used, config.layer), bias)[0]
    return _QuantizedMatmul.apply(x, weight, bias, counter, *recipe_tensors, config, eager)


def _planned(state: LayerState, key: PlanKey, x: Tensor, weight: Tensor) -> tuple[LinearPlan, bool]:
    """The plan of calls with this key, and whether autocast's cast precedes it; the layer keeps both."""
    *_, bias, dtype, needs, table = key
    signature, past = signature_of(x), state.book is not None
    fused = (dtype, x.dtype) == (torch.bfloat16, torch.float32) and not past
    casts = dtype != x.dtype and not (fused and reads_through_bf16(table, signature, needs[1]))
    signature = signature._replace(dtype=dtype if casts else x.dtype)
    planned = linear_plan(table, signature, signature_of(weight), dtype, needs, bias, past), casts
    if len(state.plans) >= _PLANS_KEPT:
        state.plans.clear()
    state.plans[key] = planned
    return planned


def autocast_dtype(input: Tensor) -> torch.dtype:
    """The dtype of nn.Linear's input under the current autocast state."""
    kind = input.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and input.dtype in _CAST:
        return torch.get_autocast_dtype(kind)
    return input.dtype


def autocast(input: Tensor) -> Tensor:
    """The input, cast to `autocast_dtype`."""
    return input.to(autocast_dtype(input))


def rows_of(x: Tensor) -> Tensor:
    """[..., K] -> [M, K], also for K = 0."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def runs_eagerly(x: Tensor) -> bool:
    """Whether nothing traces a call: no compiler, no tensor subclass, no dispatch mode, no transform."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, nn.Parameter) or x.is_meta:
        return False
    if under_torch_func():
        return False
    return torch._C._len_torch_dispatch_stack() == 0  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
