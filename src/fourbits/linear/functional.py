"""Quantized linear layers under torch.func: grad works, vmap and jvp raise one named error.

torch.func differentiates functions whose forward saves nothing but inputs and outputs, so this one computes
the operands of the backward pass again there. Values and gradients have the bits of a plain call.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from fourbits.func_transforms import UnsupportedTransformError, refuse_every_transform
from fourbits.linear.amax_policy import IN_USE
from fourbits.linear.fake_shapes import kept_parts
from fourbits.linear.flat import autocast, rows_of
from fourbits.linear.layer_state import CallConfig, LayerState
from fourbits.linear.ops import linear_backward, linear_forward
from fourbits.linear.sr_counter import of_shard, tick
from fourbits.linear.traced import NO_SECOND_DERIVATIVE
from fourbits.recipe.recipe import table_from_text


def refuse_transform(*_: Any) -> NoReturn:
    """Raises UnsupportedTransformError for vmap and jvp."""
    raise UnsupportedTransformError(
        "QuantizedLinear: torch.func.vmap and jvp are not supported, nor is forward-mode AD: all rows of a "
        "call share one scale, and rounding has no derivative; grad and vjp are. For per-sample gradients, "
        'restore the model\'s own layers with fourbits.convert(model, "bf16").'
    )


class FunctionalMatmul(torch.autograd.Function):
    """The three GEMMs of a layer, in the form that torch.func.grad needs."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        counter: Tensor,
        amax: Tensor | None,
        config: CallConfig,
        state: LayerState,
    ) -> Tensor:
        """x: [M, K]; weight: [N, K]; counter: of this call -> [M, N]."""
        call = (config.layer, config.table, "", [False, False], [], state.feedback.coefficients)
        return linear_forward(x, [], weight, bias, counter, amax, *call)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the inputs."""
        x, weight, _, counter, amax, ctx.config, ctx.state = inputs
        ctx.save_for_backward(x, weight, counter, amax)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy: [M, N] -> the gradients of the inputs."""
        x, weight, counter, amax = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        given = ctx.config, needs, ctx.state.feedback.coefficients
        found = iter(_Gradients.apply(dy.contiguous(), x, weight, counter, amax, *given))
        if ctx.config.counts_itself:
            with torch._C._DisableFuncTorch():  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
                tick(ctx.state.own_counter)
        return (*(next(found) if need else None for need in needs), *[None] * 4)

    vmap = staticmethod(refuse_transform)  # pyright: ignore[reportAssignmentType]
    jvp = staticmethod(refuse_transform)  # pyright: ignore[reportAssignmentType]


class _Gradients(torch.autograd.Function):
    """The gradients of a call that are needed, as a function that has no gradient itself."""

    @staticmethod
    def forward(
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        counter: Tensor,
        amax: Tensor | None,
        config: CallConfig,
        needs: list[bool],
        coefficients: Tensor | None,
    ) -> tuple[Tensor, ...]:
        layer, table = config.layer, config.table
        kept = kept_parts(x, table_from_text(table), needs[:2], amax is not None, False)
        of_forward = (layer, table, "", needs[:2], [], coefficients)
        forward = linear_forward(x, [], weight, None, counter, amax, *of_forward)
        saved = forward[1 : 1 + sum(kept)]
        call = (x.shape[1], layer, table, "", needs)
        grads = linear_backward(dy, None if kept[2] else x, weight, saved, kept, counter, amax, *call)
        return tuple(grads[: sum(needs)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save nothing: these gradients have none themselves."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        """Raises RuntimeError."""
        raise RuntimeError(NO_SECOND_DERIVATIVE)

    vmap = staticmethod(refuse_transform)  # pyright: ignore[reportAssignmentType]
    jvp = staticmethod(refuse_transform)  # pyright: ignore[reportAssignmentType]


def functional_matmul(
    state: LayerState, config: CallConfig, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Y [..., N] of a call under torch.func. It records no amax stats. x: [..., K]."""
    if state.weight_source is not None:
        refuse_every_transform("QuantizedLinear with a weight that arrives quantized")
    amaxes, *_ = state.recipe_tensors(x.device)
    amax = None if amaxes is None else amaxes[config.slot, :, IN_USE].clone()
    counter = state.counter_on(x.device).clone()
    if config.shard is not None:
        counter = of_shard(counter, *config.shard)
    rows = rows_of(autocast(x)).contiguous()
    y = FunctionalMatmul.apply(rows, weight.contiguous(), bias, counter, amax, config, state)
    return y.view(*x.shape[:-1], weight.shape[0])
