"""QuantizedLinear: nn.Linear whose three GEMMs obey a table. Same parameters, same state_dict, same call."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fourbits.recipe.linear_ops import linear_backward, linear_forward, new_clock
from fourbits.recipe.recipe import GemmTable

#: dtypes that autocast casts
_CAST = (torch.float32, torch.bfloat16, torch.float16)
_told: list[bool] = []


class LinearState:
    """What a converted layer knows beyond nn.Linear: its table, its number, and the clock of its random
    bits.
    """

    def __init__(
        self, original: type[nn.Linear], table: GemmTable, layer: int, seed: int, quantize_eval: bool
    ):
        self.original = original
        self.table = table.to_text()
        self.layer = layer
        self.seed = seed
        self.quantize_eval = quantize_eval
        #: int64 [5], linear_ops.CLOCK_FIELDS; shared by all layers of a model once set_step has been called
        self.clock = new_clock(seed, 0, 0)
        #: True until set_step is called: the layer then advances its own clock with every backward pass
        self.counts_itself = True

    def clock_on(self, device: torch.device) -> Tensor:
        """The clock where the layer computes; it stays there, so that a step copies it at most once."""
        if device.type == "meta":
            return self.clock.to(device)
        if self.clock.device != device:
            self.clock = self.clock.to(device)
        return self.clock


class _QuantizedProduct(torch.autograd.Function):
    """The three GEMMs, and nothing else."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        clock: Tensor,
        layer: int,
        table: str,
        counts_itself: bool,
    ) -> Tensor:
        key = clock.clone() if counts_itself else clock
        keep_weight = bool(ctx.needs_input_grad[0])
        y, w_values, w_scale = linear_forward(x, weight, bias, key, layer, table, keep_weight)
        ctx.save_for_backward(x, weight, w_values, w_scale, key)
        ctx.layer, ctx.table = layer, table
        ctx.clock = clock if counts_itself else None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, w_values, w_scale, key = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        with torch.no_grad():
            grads = linear_backward(
                dy.contiguous(), x, weight, w_values, w_scale, key, ctx.layer, ctx.table, needs
            )
        if ctx.clock is not None:
            tick(ctx.clock)
        if torch.is_grad_enabled():
            grads = [_FirstDerivative.apply(grad, dy, x, weight) for grad in grads]
        return (*(grad if need else None for grad, need in zip(grads, needs, strict=True)), *[None] * 4)


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


@torch.library.custom_op("fourbits::tick", mutates_args={"clock"})
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
        device = input.device
        if device.type != "meta" and torch.is_autocast_enabled(device.type) and input.dtype in _CAST:
            input = input.to(torch.get_autocast_dtype(device.type))
        flat = input.reshape(-1, self.in_features)
        clock = state.clock_on(device)
        y = _QuantizedProduct.apply(
            flat, self.weight, self.bias, clock, state.layer, state.table, state.counts_itself
        )
        return y.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """nn.Linear's, and the table's formats."""
        return f"{super().extra_repr()}, layer={self.quantization.layer}"
