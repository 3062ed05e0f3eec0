"""QuantizedLinear: nn.Linear whose three GEMMs obey a table. Same parameters, same state_dict, same call."""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.library import custom_op

from fourbits.linear.amax_policy import IN_USE, commit, observe
from fourbits.linear.layer_state import Facts, LinearState
from fourbits.linear.operand_cache import Operands, SharedInput, runs_directly
from fourbits.linear.operands import Call
from fourbits.linear.ops import (
    Made,
    backward_of,
    forward_of,
    input_operands,
    linear_backward,
    linear_forward,
    made_of,
)
from fourbits.quant.tensor import ExactOperand, QuantizedTensor
from fourbits.recipe.recipe import table_from_text

#: dtypes that autocast casts
_CAST = (torch.float32, torch.bfloat16, torch.float16)
_told: list[bool] = []
_last_input = SharedInput()


class _Direct(NamedTuple):
    """A call that goes around the operators, and its operands of Fprop."""

    call: Call
    made: Made


class _QuantizedProduct(torch.autograd.Function):
    """The three GEMMs; around them, what the layer's clock and book note."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        clock: Tensor,
        amaxes: Tensor | None,
        counters: Tensor | None,
        policy: Tensor | None,
        facts: Facts,
        direct: "_Direct | None",
    ) -> Tensor:
        keep = [bool(need) for need in ctx.needs_input_grad[:2]]
        if direct is None:
            key = clock.clone() if facts.counts_itself else clock
            amax = None if amaxes is None else amaxes[facts.slot, :, IN_USE].clone()
            outputs = linear_forward(
                x, weight, bias, key, amax, facts.layer, facts.table, facts.measured, keep
            )
        else:
            key, amax = direct.call.clock, direct.call.amax
            outputs = forward_of(direct.call, direct.made, x, bias, keep)
        y, w_values, w_scale, *x_kept, own, counts = outputs
        x_saved = None if x_kept[0].dim() == 2 else x
        ctx.save_for_backward(x_saved, weight, w_values, w_scale, *x_kept, key, amax)
        ctx.facts, ctx.clock = facts, clock
        ctx.amaxes, ctx.counters, ctx.policy = amaxes, counters, policy
        if facts.observes and amaxes is not None and counters is not None:
            observe(amaxes, counters, own, counts, facts.slot, 0)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, w_values, w_scale, x_values, x_scale, x_global, key, amax = ctx.saved_tensors
        facts: Facts = ctx.facts
        needs, dy = list(ctx.needs_input_grad[:3]), dy.contiguous()
        run = backward_of if runs_directly(dy) else linear_backward
        with torch.no_grad():
            *grads, own, counts = run(
                dy,
                x,
                weight,
                w_values,
                w_scale,
                x_values,
                x_scale,
                x_global,
                key,
                amax,
                facts.layer,
                facts.table,
                facts.measured,
                needs,
            )
            if facts.observes and ctx.amaxes is not None:
                observe(ctx.amaxes, ctx.counters, own, counts, facts.slot, 2)
        if facts.counts_itself:
            tick(ctx.clock)
            if facts.observes and ctx.amaxes is not None:
                commit(ctx.amaxes, ctx.counters, ctx.policy, ctx.clock, facts.slot)
        if torch.is_grad_enabled():
            sources = [dy, weight] if x is None else [dy, x, weight]
            grads = [_FirstDerivative.apply(grad, *sources) for grad in grads]
        return (*(grad if need else None for grad, need in zip(grads, needs, strict=True)), *[None] * 6)


class _FirstDerivative(torch.autograd.Function):
    """Identity on a gradient that was asked for with create_graph; differentiating it again is an error."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "QuantizedLinear: its gradients cannot be differentiated again, because rounding has no "
            "derivative. For a gradient penalty or a Hessian product give the model its nn.Linears back with "
            'fourbits.convert(model, "bf16"), or keep the layers concerned in BF16 with keep_bf16.names.'
        )


@custom_op("fourbits::tick", mutates_args={"clock"})
def tick(clock: Tensor) -> None:
    """Advance a layer's own clock by one step, and say once what that cannot give."""
    clock[1] += 1
    if not _told:
        _told.append(True)
        warnings.warn(
            "fourbits: set_step was never called, so each layer counts its own backward passes. Noise is "
            "fresh at every step, but it depends on the number of ranks and micro-batches, and a resumed run "
            "draws other noise. Call fourbits.set_step(model, step) before each micro-batch.",
            stacklevel=2,
        )


@tick.register_fake
def _(clock: Tensor) -> None:
    return None


def autocast(input: Tensor) -> Tensor:
    """The input of a linear as autocast, where it is on, would give it to nn.Linear."""
    kind = input.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and input.dtype in _CAST:
        return input.to(torch.get_autocast_dtype(kind))
    return input


def product(
    state: LinearState, x: Tensor, weight: Tensor, offset: int, ticks: bool, training: bool
) -> Tensor:
    """X W^T by the state's table, as a layer `offset` numbers on would compute it; X [M, K], W [N, K].

    For layers of several products: no bias, no amax policies, no operand is used again. ticks: whether this
    product's backward pass advances the layer's own clock.
    """
    facts = state.facts(training)
    clock = state.clock_on(x.device)
    if facts.counts_itself and not ticks:
        clock = clock.clone()
    facts = facts._replace(layer=facts.layer + offset, counts_itself=facts.counts_itself and ticks)
    return _QuantizedProduct.apply(x, weight, None, clock, None, None, None, facts, None)


class QuantizedLinear(nn.Linear):
    """An nn.Linear that `convert` has given a table. Made by conversion only, never constructed."""

    quantization: LinearState

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in_features] float -> [..., out_features] in nn.Linear's output dtype."""
        state = self.quantization
        if not (self.training or state.quantize_eval):
            return state.original.forward(self, input)
        if input.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"QuantizedLinear: the last dimension of the input must be in_features={self.in_features}, "
                f"got shape {list(input.shape)}."
            )
        device, input = input.device, autocast(input)
        facts = state.facts(training=self.training and torch.is_grad_enabled())
        direct = self._directly(input, facts) if runs_directly(input) else None
        y = _QuantizedProduct.apply(
            _rows(input),
            self.weight,
            self.bias,
            state.clock_on(device),
            *state.amaxes_on(device),
            facts,
            direct,
        )
        return y.view(*input.shape[:-1], self.out_features)

    def _directly(self, input: Tensor, facts: Facts) -> _Direct:
        """The operands of Fprop, where possible those that this step has made before."""
        state, table = self.quantization, table_from_text(facts.table)
        amaxes = state.amaxes_on(input.device)[0]
        key = state.clock_on(input.device)
        key = key.clone() if facts.counts_itself else key
        amax = None if amaxes is None else amaxes[facts.slot, :, IN_USE].clone()
        call = Call(table, key, facts.layer, amax, facts.measured)
        keep = torch.is_grad_enabled() and self.weight.requires_grad

        def from_input() -> Operands:
            return input_operands(call, _rows(input.detach()), keep)

        def from_weight() -> ExactOperand | QuantizedTensor:
            return call.multiplicand(self.weight.detach(), 1, "fprop.rhs")

        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            if call.depends_on_the_call("fprop.lhs", "wgrad.rhs"):
                lhs, *wgrad_rhs = from_input()
            else:
                how = (table.fprop.lhs, table.wgrad.rhs, table.saved_inputs, table.native, keep)
                lhs, *wgrad_rhs = _last_input.operands(input, how, from_input)
            if call.depends_on_the_call("fprop.rhs") or not facts.observes:
                rhs = from_weight()
            else:
                rhs = state.weight.operand(self.weight, facts.table, from_weight)
        return _Direct(call, made_of(lhs, rhs, wgrad_rhs))

    def extra_repr(self) -> str:
        """nn.Linear's, and the table's formats."""
        return f"{super().extra_repr()}, layer={self.quantization.layer}"


def _rows(x: Tensor) -> Tensor:
    """[..., K] -> [M, K], also for K = 0."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]
