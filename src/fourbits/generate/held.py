"""Quantized layers for generation: weights quantized once, inputs by an amax that calibration has measured.

In training an operand's scale follows the amax of the tensor that is multiplied. In generation that tensor
is one token of every sequence of a batch, so a token's result would depend on its neighbors. With the amax
held, it does not.
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fourbits.gemm.matmul import multiply
from fourbits.linear.module import QuantizedLinear
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import exact_operand, own_amaxes
from fourbits.quant.request import OperandInputs, OperandRequest, draws
from fourbits.recipe.recipe import table_from_text


class _Held:
    """The forward pass of one layer."""

    def __init__(self, layer: QuantizedLinear, name: str) -> None:
        table = table_from_text(layer.quantization.table)
        self.spec, self.layer = table.fprop.lhs, layer
        _check(name, self.spec, table.fprop.rhs)
        #: the largest magnitude that calibration has seen, fp32; None where the format has no tensor scale
        self.amax: Tensor | None = None
        self.weight = exact_operand(layer.weight.detach(), table.fprop.rhs, axis=1)

    def measure(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """A forward hook during calibration."""
        if not self.spec.tensor_scaled:
            return
        x = args[0].flatten(0, -2)
        request = OperandRequest(self.spec, axis=1)
        (own,) = own_amaxes(x, (request,), (OperandInputs(),)).unbind()
        self.amax = own if self.amax is None else torch.maximum(self.amax, own)

    def __call__(self, input: Tensor) -> Tensor:
        """input: [..., K] -> [..., N] in its dtype."""
        x = exact_operand(input.flatten(0, -2), self.spec, axis=1, amax=self.amax)
        y = multiply(x, self.weight, input.dtype, self.layer.bias)
        return y.view(*input.shape[:-1], -1)


@contextmanager
def held_operands(model: nn.Module, calibration: Sequence[Tensor]) -> Generator[int]:
    """Inside, the model's quantized layers use held amaxes and weights; yields the number of those layers.

    calibration: batches of tokens, int64 [B, T] each; the amax of an input is the largest over all of them.
    Raises ValueError without batches, and for a recipe whose Fprop rounds stochastically or has corrections.
    """
    if not calibration:
        raise ValueError("held_operands: calibration must have at least one batch of tokens, got none.")
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear) and not module.quantization.runs_original(training=False)
    }
    held = {layer: _Held(layer, name) for name, layer in layers.items()}
    with torch.no_grad():
        hooks = [layer.register_forward_pre_hook(ours.measure) for layer, ours in held.items()]
        training = model.training
        model.eval()
        for batch in calibration:
            model(batch)
        model.train(training)
    for hook in hooks:
        hook.remove()
    with ExitStack() as stack:
        for layer, ours in held.items():
            stack.enter_context(_replaced_forward(layer, ours))
        yield len(held)


@contextmanager
def _replaced_forward(layer: nn.Module, forward: _Held) -> Generator[None]:
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


def _check(name: str, lhs: OperandSpec, rhs: OperandSpec) -> None:
    for side, spec in (("lhs", lhs), ("rhs", rhs)):
        if draws(spec) or spec.correction or spec.adaptive != "none":
            raise ValueError(
                f"held_operands: fprop.{side} of {name} must round to nearest, without a correction or an "
                f"adaptive layout. Generate in BF16."
            )
