"""Errors of single operands: by format, of the largest elements, by rounding, and of W by direction."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fourbits.compare.techniques.findings import (
    NO_TENSOR_SCALE,
    LargestElement,
    OperandError,
    OperandName,
    RoundingBias,
    WeightMismatch,
)
from fourbits.compare.techniques.trained import LayerTensors
from fourbits.formats.descriptors import E4M3
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.recipe.presets import get_recipe

# Elements along the contraction among which the largest one is measured: NVFP4's block.
GROUP = 16
#: stochastic draws whose mean is compared with rounding to nearest
DRAWS = 64
#: tokens of dY for which these draws are made
DRAWN_TOKENS = 512


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of `exact`; 0 for two zero tensors."""
    norm = exact.norm()
    return float((found - exact).norm() / norm) if norm else float(found.norm())


def key(layer: int, draw: int) -> Tensor:
    """The key of a layer's random bits in one draw: (seed, stream, step, first row, first block)."""
    return torch.tensor([0, layer, draw, 0, 0], dtype=torch.int64, device="cpu")


def operand_errors(recipe: str, number: int, layer: LayerTensors) -> Iterator[OperandError]:
    """X, W and dY of a layer, quantized as a recipe does. number: the layer's index."""
    for operand, tensor, spec in _operands(recipe, layer):
        found = quantize(tensor, spec, 1, sr_key=key(number, 0)).dequantize()
        yield OperandError(
            layer=layer.name, operand=operand, recipe=recipe, error=relative_error(found, tensor.float())
        )


def largest_elements(recipe: str, layer: LayerTensors) -> Iterator[LargestElement]:
    """The largest elements of X, W and dY in a recipe's format; for nvfp4 also without tensor scale."""
    for operand, tensor, spec in _operands(recipe, layer):
        nearest = replace(spec, rounding="rne")
        amaxes: list[tuple[str, Tensor | None]] = [(recipe, None)]
        if recipe == "nvfp4":
            amaxes.append((NO_TENSOR_SCALE, _unit_amax(nearest)))
        for name, amax in amaxes:
            found = quantize(tensor, nearest, 1, amax=amax).dequantize()
            yield LargestElement(
                layer=layer.name, operand=operand, format=name, error=_largest_error(found, tensor.float())
            )


def rounding_bias(recipe: str, number: int, layer: LayerTensors) -> RoundingBias:
    """dY of a layer in a recipe's format: rounded to nearest, and stochastically DRAWS times."""
    spec = get_recipe(recipe).dgrad.lhs
    dy = layer.dy[:DRAWN_TOKENS]
    exact = dy.float()
    total = torch.zeros_like(exact)
    squares = 0.0
    for draw in range(DRAWS):
        found = quantize(dy, spec, 1, sr_key=key(number, draw)).dequantize()
        total += found
        squares += relative_error(found, exact) ** 2
    nearest = quantize(dy, replace(spec, rounding="rne"), 1).dequantize()
    return RoundingBias(
        layer=layer.name,
        recipe=recipe,
        draws=DRAWS,
        nearest=relative_error(nearest, exact),
        one_draw=(squares / DRAWS) ** 0.5,
        mean_of_draws=relative_error(total / DRAWS, exact),
    )


def weight_mismatch(layer: LayerTensors) -> Iterator[WeightMismatch]:
    """W in NVFP4, quantized along K for Fprop and along N for Dgrad: in 1x16 and in 16x16 blocks."""
    exact = layer.weight.float()
    for block in ((1, GROUP), (GROUP, GROUP)):
        spec = OperandSpec(block=block, source="bf16")
        fprop, dgrad = (quantize(layer.weight, spec, axis).dequantize() for axis in (1, 0))
        yield WeightMismatch(
            layer=layer.name,
            block=f"{block[0]}x{block[1]}",
            mismatch=float((fprop - dgrad).norm() / exact.norm()),
            error=relative_error(fprop, exact),
        )


def _operands(recipe: str, layer: LayerTensors) -> tuple[tuple[OperandName, Tensor, OperandSpec], ...]:
    """X and W as in Fprop, dY as in Dgrad, all contracted along their second axis."""
    table = get_recipe(recipe).table
    return (
        ("X", layer.x, table.fprop.lhs),
        ("W", layer.weight, table.fprop.rhs),
        ("dY", layer.dy, table.dgrad.lhs),
    )


def _unit_amax(spec: OperandSpec) -> Tensor:
    """The amax for which a tensor's FP32 scale is 1, so that block scales alone must cover its range."""
    element = spec.block_format.element
    assert element is not None, "nvfp4 has elements"
    return torch.tensor(element.max_value * E4M3.max_value, dtype=torch.float32, device="cpu")


def _largest_error(found: Tensor, exact: Tensor) -> float:
    """Mean relative error of the largest element in each GROUP along the second axis; zero groups skipped."""
    columns = exact.shape[1] // GROUP * GROUP
    groups = exact[:, :columns].reshape(-1, GROUP)
    place = groups.abs().argmax(1, keepdim=True)
    largest = groups.gather(1, place)
    kept = found[:, :columns].reshape(-1, GROUP).gather(1, place)
    nonzero = largest != 0
    return float(((kept - largest) / largest)[nonzero].abs().mean())
