"""Quantized linear layers under torch.func: grad works, vmap and jvp raise one named error.

torch.func differentiates functions whose forward saves nothing but inputs and outputs, so this one computes
the operands of the backward pass again there. Values and gradients have the bits of a plain call.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from fourbits.linear.amax_policy import IN_USE
from fourbits.linear.layer_state import CallConfig, LayerState
from fourbits.linear.ops import linear_backward, linear_forward

NO_SECOND_DERIVATIVE = (
    "QuantizedLinear: second derivatives are not supported, because rounding has no derivative. For "
    "a gradient penalty or a Hessian-vector product, restore the model's nn.Linear layers with "
    'fourbits.convert(model, "bf16"), or keep the affected layers in BF16 with keep_bf16.names.'
)


class UnsupportedTransformError(RuntimeError):
    """A transform of torch.func that quantized layers have no rule for."""


def refuse_transform(*_: Any) -> NoReturn:
    """Raises UnsupportedTransformError."""
    raise UnsupportedTransformError(
        "QuantizedLinear: torch.func.vmap and jvp are not supported, because all rows of a call share one "
        "scale and rounding has no derivative; grad and vjp are. For per-sample gradients, restore "
        'the model\'s own layers with fourbits.convert(model, "bf16").'
    )


class FunctionalMatmul(torch.autograd.Function):
    """The three GEMMs of a layer, in the form that torch.func.grad asks for."""

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
        needs = [False, False]
        return linear_forward(x, weight, bias, counter, amax, config.layer, config.table, "", needs)[0]

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
        outputs = _Gradients.apply(dy, x, weight, counter, amax, ctx.config, needs)
        if ctx.config.counts_itself:
            with torch._C._DisableFuncTorch():  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
                ctx.state.own_counter[1] += 1
        return (*(grad if need else None for grad, need in zip(outputs, needs, strict=False)), *[None] * 4)

    vmap = staticmethod(refuse_transform)  # pyright: ignore[reportAssignmentType]
    jvp = staticmethod(refuse_transform)  # pyright: ignore[reportAssignmentType]


class _Gradients(torch.autograd.Function):
    """The gradients of a call, which have none themselves."""

    @staticmethod
    def forward(
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        counter: Tensor,
        amax: Tensor | None,
        config: CallConfig,
        needs: list[bool],
    ) -> tuple[Tensor, ...]:
        call = (config.layer, config.table, "")
        parts = linear_forward(x, weight, None, counter, amax, *call, needs[:2])[1:6]
        shape = list(x.shape)
        return tuple(
            linear_backward(dy.contiguous(), x, weight, parts, counter, amax, shape, *call, needs)[:3]
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        """Raises RuntimeError."""
        raise RuntimeError(NO_SECOND_DERIVATIVE)

    vmap = staticmethod(refuse_transform)  # pyright: ignore[reportAssignmentType]
    jvp = staticmethod(refuse_transform)  # pyright: ignore[reportAssignmentType]


def functional_matmul(
    state: LayerState, config: CallConfig, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Y [M, N] of a call under torch.func. It records no amax stats. x: [M, K]."""
    amaxes, *_ = state.recipe_tensors(x.device)
    amax = None if amaxes is None else amaxes[config.slot, :, IN_USE].clone()
    counter = state.counter_on(x.device).clone()
    return FunctionalMatmul.apply(x, weight, bias, counter, amax, config, state)
