"""Speed of a linear, forward and backward, as a share of the same linear in BF16 under torch.compile.

Both have FP32 master weights and gradients. The ceiling is what the BF16 linear's time allows if quantization
moved its bytes at copy bandwidth and the products took as long as in BF16.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fourbits.bench.timing import Bar, Report, copy_bandwidth, measured, medians, normal, product_rate
from fourbits.device import probe
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.model.linear import Linear
from fourbits.quant.operand import OperandSpec
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import GemmSpec, KeepBF16, Recipe

#: (tokens, in_features, out_features) -> goals with the tensors' own amax, and with an amax supplied
_CARD_SHAPES = {
    (8192, 5120, 20480): (0.90, 0.92),
    (8192, 4096, 4096): (0.82, 0.86),
    (8192, 2048, 6144): (0.76, 0.81),
}
#: the same for an H200, whose memory is 1.4 times as fast as an H100's
_H200_SHAPES = {
    (8192, 5120, 20480): (0.93, 0.95),
    (8192, 4096, 4096): (0.86, 0.90),
    (8192, 2048, 6144): (0.81, 0.86),
}
_CPU_SHAPE, _CPU_GOAL = (2048, 2048, 2048), 0.4
_UNIT = "of BF16"


def bench_linear(device: torch.device) -> Report:
    """Every bar of a linear on a device: nvfp4 with its own amaxes and with delayed ones, and fp8."""
    rates = copy_bandwidth(device), product_rate(device)
    shapes = _shapes(device.type, probe(device).name)
    bars: list[Bar] = []
    for shape, goals in shapes.items():
        bars += _bars(device, shape, goals, rates[0])
    return measured("linear", device, tuple(bars), rates)


def _shapes(kind: str, name: str) -> Mapping[tuple[int, int, int], tuple[float | None, float | None]]:
    """What is timed on a device of this kind and name, with its goals."""
    if kind != "cuda":
        return {_CPU_SHAPE: (_CPU_GOAL, None)}
    return _H200_SHAPES if name == "NVIDIA H200" else _CARD_SHAPES


def _bars(
    device: torch.device,
    shape: tuple[int, int, int],
    goals: tuple[float | None, float | None],
    bandwidth: float,
) -> list[Bar]:
    tokens, columns, rows = shape
    x = normal(tokens, columns, device=device).to(torch.bfloat16)
    dy = normal(tokens, rows, device=device, seed=1).to(torch.bfloat16)
    size = "x".join(map(str, shape))
    recipes = {
        f"{size} nvfp4": (_everywhere("nvfp4"), goals[0], True),
        f"{size} nvfp4, amax supplied": (_with_delayed_amax(_everywhere("nvfp4")), goals[1], False),
        f"{size} fp8": (_everywhere("fp8"), None, False),
    }
    bf16 = torch.compile(_linear(columns, rows, device))
    layers = [_converted(r, columns, rows, device) for r, _, _ in recipes.values()]
    for layer in layers:
        _step(layer, x, dy)()
        set_step(layer, 1)  # only now has an amax policy something to supply
    steps = [_step(layer, x, dy) for layer in (bf16, *layers)]
    base, *times = medians(steps, device, repeats=15, ahead=True)
    bars = [Bar(name=f"{size} bf16", seconds=base, value=1.0, unit=_UNIT)]
    for (name, (_, goal, own_amax)), seconds in zip(recipes.items(), times, strict=True):
        ceiling = base / (base + _quantized_bytes(shape, own_amax) / bandwidth) if "nvfp4" in name else None
        bars.append(
            Bar(name=name, seconds=seconds, value=base / seconds, unit=_UNIT, goal=goal, ceiling=ceiling)
        )
    return bars


def _quantized_bytes(shape: tuple[int, int, int], own_amax: bool) -> float:
    """Least bytes of quantization: both operands of X and dY from one read, W once, an amax read before each.

    The BF16 linear reads W in FP32 and writes it in BF16 too, which is taken off.
    """
    tokens, columns, rows = shape
    activations = tokens * (columns + rows)
    return activations * (8.0 if own_amax else 6.0) + columns * rows * (4.0 if own_amax else 0.0)


def _step(layer: nn.Module | Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Callable[[], object]:
    """Forward and backward of both inputs, gradients not accumulated.

    x is a new tensor each time, as it is in training: operands of the last one are not used again.
    """

    def step() -> None:
        if isinstance(layer, nn.Module):
            layer.zero_grad(set_to_none=True)
        layer(x.detach().requires_grad_()).backward(dy)

    return step


def _converted(recipe: Recipe, columns: int, rows: int, device: torch.device) -> nn.Module:
    layer = nn.Sequential(_linear(columns, rows, device))
    convert(layer, recipe)
    set_step(layer, 0)
    return layer


def _linear(columns: int, rows: int, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        layer = Linear(columns, rows)
    layer.weight = nn.Parameter(normal(rows, columns, device=device, seed=2) * 0.02)
    return layer


def _everywhere(name: str) -> Recipe:
    """A shipped recipe without layers that it keeps in BF16."""
    return replace(get_recipe(name), keep_bf16=KeepBF16(names=()))


def _with_delayed_amax(recipe: Recipe) -> Recipe:
    """The recipe with every amax taken from the step before, as if the tensor's writer had supplied it."""

    def delayed(spec: OperandSpec) -> OperandSpec:
        return replace(spec, amax_policy="delayed")

    def both(gemm: GemmSpec) -> GemmSpec:
        return GemmSpec(lhs=delayed(gemm.lhs), rhs=delayed(gemm.rhs))

    return replace(recipe, fprop=both(recipe.fprop), dgrad=both(recipe.dgrad), wgrad=both(recipe.wgrad))
