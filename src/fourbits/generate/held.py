"""Quantized layers for generation: weights are quantized once, inputs with a constant amax from calibration.

In training, an operand's scale follows the amax of the tensor that is multiplied. In generation that tensor
holds one token of every sequence of a batch, so a token's result would depend on the other sequences. With a
constant ("held") amax it does not.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from fourbits.exchange.nvfp4_checkpoints import BLOCK, PackedWeight
from fourbits.gemm.matmul import multiply
from fourbits.linear.layer_state import weight_in_use
from fourbits.linear.module import QuantizedLinear
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import exact, exact_operand, own_amaxes
from fourbits.quant.request import OperandInputs, OperandRequest, draws
from fourbits.quant.tensor import ExactOperand, QuantizedTensor
from fourbits.recipe.recipe import GemmTable, table_from_text


class HeldLayer:
    """The forward pass of one layer. amax: of its inputs, fp32 scalar; None: each input's own amax."""

    def __init__(
        self, layer: nn.Linear, inputs: OperandSpec, weight: ExactOperand, amax: Tensor | None = None
    ) -> None:
        self.layer, self.inputs, self.weight, self.amax = layer, inputs, weight, amax

    def measuring(self, input: Tensor) -> Tensor:
        """The forward pass with each input's own amax; keeps the largest of them."""
        known, self.amax = self.amax, None
        y = self(input)
        if self.inputs.tensor_scaled:
            x, request = input.flatten(0, -2), OperandRequest(self.inputs, axis=1)
            (own,) = own_amaxes(x, (request,), (OperandInputs(),)).unbind()
            self.amax = own if known is None else torch.maximum(known, own)
        return y

    def __call__(self, input: Tensor) -> Tensor:
        """input: [..., K] -> [..., N] in its dtype."""
        x = exact_operand(input.flatten(0, -2), self.inputs, axis=1, amax=self.amax)
        y = multiply(x, self.weight, input.dtype, self.layer.bias)
        return y.view(*input.shape[:-1], -1)


def recipe_layers(model: nn.Module) -> list[HeldLayer]:
    """The quantized layers of a converted model; they stay valid when it is converted to another recipe.

    Raises ValueError for a recipe whose Fprop rounds stochastically, has corrections or an adaptive layout.
    """
    found: list[HeldLayer] = []
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantizedLinear) or layer.quantization.runs_original(training=False):
            continue
        text, amax = weight_in_use(layer.quantization)
        table = table_from_text(text)
        _check(name, table)
        master = layer.weight.detach()
        amax = None if amax is None else amax.to(master.device)
        weight = exact_operand(master, table.fprop.rhs, axis=1, amax=amax)
        found.append(HeldLayer(layer, table.fprop.lhs, weight))
    return found


def stored_layer(layer: nn.Linear, packed: PackedWeight, input_scale: Tensor | None) -> HeldLayer:
    """A layer with a checkpoint's codes and scales. input_scale: its factor for inputs, fp32 scalar, or None.

    Inputs are NVFP4 in 1x16 blocks, as servers quantize them.
    """
    rows, columns = packed.codes.shape
    spec, device = OperandSpec(block=(1, BLOCK)), layer.weight.device
    stored = QuantizedTensor(
        packed.codes.to(device),
        packed.block_scale.to(device),
        packed.global_scale.to(device),
        axis=1,
        shape=(rows, 2 * columns),
        spec=spec,
    )
    # the scale of an amax is amax / (6 * 448): docs/nvfp4.md, section 5
    amax = None if input_scale is None else (input_scale * (6 * 448)).to(device)
    return HeldLayer(layer, spec, exact(stored), amax)


@torch.no_grad()
def calibrate(model: nn.Module, layers: Sequence[HeldLayer], calibration: Sequence[Tensor]) -> None:
    """Measure the input amax of every layer that has none.

    calibration: batches of tokens, int64 [B, T] each; an amax is the largest over all of them. Raises
    ValueError without batches.
    """
    if not calibration:
        raise ValueError(
            "held_operands: calibration must have at least one batch of tokens, got none. Pass one."
        )
    unknown = [layer for layer in layers if layer.amax is None]
    training = model.training
    model.eval()
    with _replaced({held.layer: held for held in layers} | {h.layer: h.measuring for h in unknown}):
        for batch in calibration:
            model(batch)
    model.train(training)


@contextmanager
def in_use(layers: Sequence[HeldLayer]) -> Generator[None]:
    """Inside the block, the model's layers compute with their held operands."""
    with _replaced({held.layer: held for held in layers}):
        yield


@contextmanager
def held_operands(model: nn.Module, calibration: Sequence[Tensor]) -> Generator[int]:
    """Inside the block, the model's quantized layers use held amaxes and weights; yields their number.

    Arguments and errors are those of `recipe_layers` and `calibrate`.
    """
    layers = recipe_layers(model)
    calibrate(model, layers, calibration)
    with in_use(layers):
        yield len(layers)


@contextmanager
def _replaced(forwards: Mapping[nn.Linear, Callable[..., Tensor]]) -> Generator[None]:
    with ExitStack() as stack:
        for layer, forward in forwards.items():
            stack.callback(layer.__dict__.pop, "forward", None)
            layer.forward = forward
        yield


def _check(name: str, table: GemmTable) -> None:
    if table.hot_channels:
        raise ValueError(
            f"held_operands: {name} has hot channels, which held operands lack. Generate in BF16."
        )
    for side, spec in (("lhs", table.fprop.lhs), ("rhs", table.fprop.rhs)):
        if draws(spec) or spec.correction or spec.adaptive != "none":
            raise ValueError(
                f"held_operands: fprop.{side} of {name} must round to nearest, without a correction or an "
                f"adaptive layout. Generate in BF16."
            )
