"""A quantized linear layer where something traces it: the compiler, a tensor subclass, a dispatch mode.

The compiler's front end is slow, so it sees one operator per layer. The operator's implementation, an
autograd.Function around the operators of ops.py, is traced by the back end, at a tenth of the cost.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fourbits.linear.amax_policy import IN_USE, commit, observe
from fourbits.linear.fake_shapes import kept_parts
from fourbits.linear.flat import autocast, rows_of
from fourbits.linear.layer_state import CallConfig, FeatureShard
from fourbits.linear.ops import linear_backward, linear_forward, linear_inputs
from fourbits.linear.plan import keeps_row, shares_input
from fourbits.linear.sr_counter import after_tokens, of_shard, tick
from fourbits.linear.traced_calls import tokens_before
from fourbits.operators import operator
from fourbits.recipe.recipe import table_from_text

NO_SECOND_DERIVATIVE = (
    "QuantizedLinear: second derivatives are not supported, because rounding has no derivative. For "
    "a gradient penalty or a Hessian-vector product, restore the model's nn.Linear layers with "
    'fourbits.convert(model, "bf16"), or keep the affected layers in BF16 with keep_bf16.names.'
)


@operator(
    "linear(Tensor input, Tensor weight, Tensor? bias, Tensor(a!) counter, Tensor(b!)? amaxes, "
    "Tensor(c!)? counters, Tensor? policy, SymInt layer, str table, str measured, SymInt slot, "
    "bool counts_itself, bool training, SymInt[] shard, Tensor[] quantized_weight, Tensor? coefficients) -> "
    "Tensor"
)
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counter: Tensor,
    amaxes: Tensor | None,
    counters: Tensor | None,
    policy: Tensor | None,
    layer: int,
    table: str,
    measured: str,
    slot: int,
    counts_itself: bool,
    training: bool,
    shard: list[int],
    quantized_weight: list[Tensor],
    coefficients: Tensor | None,
) -> Tensor:
    """A call of a QuantizedLinear: [..., K] -> [..., N] in nn.Linear's output dtype.

    counter, which the backward pass advances if the layer counts itself, and the recipe state, which both
    passes record in, are as in LayerState; quantized_weight: `flat.weight_parts` of a weight that arrives
    quantized, or none; coefficients: of its error feedback; the others are the fields of its CallConfig.
    """
    if input.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            "QuantizedLinear: the last dimension of the input must be in_features="
            f"{weight.shape[1]}, got shape {list(input.shape)}. Pass an input of that width."
        )
    observes = training and torch.is_grad_enabled()
    config = CallConfig(
        layer,
        table,
        counts_itself,
        training,
        observes,
        measured,
        slot,
        FeatureShard(*shard) if shard else None,
    )
    x = rows_of(autocast(input)).contiguous()
    first = tokens_before(counter, layer, table, training, x.shape[0])
    y: Any = _TracedMatmul.apply(
        *(x, weight.contiguous(), bias, counter, amaxes, counters, policy, config, first, coefficients),
        *quantized_weight,
    )
    return y.view(*input.shape[:-1], weight.shape[0])


class _TracedMatmul(torch.autograd.Function):
    """The three GEMMs, and the updates of the layer's counter and recipe state around them."""

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
        first: int | None,
        coefficients: Tensor | None,
        *quantized_weight: Tensor,
    ) -> Tensor:
        amax = None if amaxes is None else amaxes[config.slot, :, IN_USE].clone()
        counter_used = counter.clone() if config.counts_itself else counter
        if first is not None:
            counter_used = after_tokens(counter_used, first)
        if config.shard is not None:
            counter_used = of_shard(counter_used, *config.shard)
        needs, table = [bool(need) for need in ctx.needs_input_grad[:2]], table_from_text(config.table)
        inputs: list[Tensor] = []
        if amax is None and shares_input(table):
            inputs = linear_inputs(x, config.table, needs[1])
        y, *outputs = linear_forward(
            *(x, inputs[:2], weight, bias, counter_used, amax),
            *(config.layer, config.table, config.measured, needs, list(quantized_weight), coefficients),
        )
        kept = kept_parts(x, table, needs, amax is not None, bool(quantized_weight))
        shared = inputs[:2] if keeps_row(table) else inputs[2:]
        saved = [*outputs[: sum(kept[:2])], *shared, *outputs[sum(kept[:2]) :]][: sum(kept)]
        if config.observes and amaxes is not None and counters is not None:
            observe(amaxes, counters, outputs[-2], outputs[-1], config.slot, 0)
        ctx.save_for_backward(None if kept[2] else x, weight, counter_used, amax, *saved)
        ctx.kept, ctx.columns, ctx.config, ctx.counter = kept, x.shape[1], config, counter
        ctx.amaxes, ctx.counters, ctx.policy = amaxes, counters, policy
        ctx.others = 7 + len(quantized_weight)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counter, amax, *saved = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        grads = traced_gradients(ctx, dy.contiguous(), x, weight, saved, ctx.kept, counter, amax, needs)
        return (*grads, *[None] * ctx.others)


def traced_gradients(
    ctx: Any,
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    saved: list[Tensor],
    kept: list[bool],
    counter: Tensor,
    amax: Tensor | None,
    needs: list[bool],
) -> list[Tensor | None]:
    """The gradients of X, W and bias, None where not needed. ctx: with the config and state of a call."""
    config: CallConfig = ctx.config
    with torch.no_grad():
        outputs = linear_backward(
            *(dy, x, weight, saved, kept, counter, amax),
            *(ctx.columns, config.layer, config.table, config.measured, needs),
        )
        if config.observes and ctx.amaxes is not None:
            observe(ctx.amaxes, ctx.counters, outputs[-2], outputs[-1], config.slot, 2)
        if config.counts_itself:
            tick(ctx.counter)
            if config.observes and ctx.amaxes is not None:
                commit(ctx.amaxes, ctx.counters, ctx.policy, ctx.counter, config.slot)
    found = iter(outputs)
    grads = [next(found) if need else None for need in needs]
    if torch.is_grad_enabled():
        return once_differentiable(grads, [dy, weight] if x is None else [dy, x, weight])
    return grads


def once_differentiable(grads: Sequence[Tensor | None], sources: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients computed with create_graph, which raise when they are differentiated again."""
    return [grad if grad is None else _FirstDerivative.apply(grad, *sources) for grad in grads]


class _FirstDerivative(torch.autograd.Function):
    """Identity on a gradient computed with create_graph; differentiating it again is an error."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(NO_SECOND_DERIVATIVE)
