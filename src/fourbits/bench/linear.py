"""Speed of a linear layer, forward and backward, relative to the same layer in BF16 under torch.compile.

Both have FP32 master weights and gradients. The ceiling assumes that quantization moves its bytes at copy
bandwidth and that the GEMMs take as long as in BF16.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fourbits.bench.timing import (
    Measurements,
    Result,
    copy_bandwidth,
    host_medians,
    measured,
    medians,
    normal,
    product_rate,
)
from fourbits.device import probe
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.model.linear import Linear
from fourbits.quant.operand import OperandSpec
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import GemmSpec, KeepBF16, Recipe

#: (tokens, in_features, out_features) -> targets with a measured amax, and with a supplied amax
_GPU_SHAPES = {
    (8192, 5120, 20480): (0.90, 0.92),
    (8192, 4096, 4096): (0.82, 0.86),
    (8192, 2048, 6144): (0.76, 0.81),
}
#: the same for an H200, whose memory is 1.4 times faster than an H100's
_H200_SHAPES = {
    (8192, 5120, 20480): (0.93, 0.95),
    (8192, 4096, 4096): (0.86, 0.90),
    (8192, 2048, 6144): (0.81, 0.86),
}
_CPU_SHAPE, _CPU_GOAL = (2048, 2048, 2048), 0.4
_UNIT = "of BF16"


def bench_linear(device: torch.device) -> Measurements:
    """Measure nvfp4 with measured and with delayed amaxes, and fp8, on a device."""
    rates = copy_bandwidth(device), product_rate(device)
    shapes = _shapes(device.type, probe(device).name)
    results: list[Result] = []
    for shape, goals in shapes.items():
        results += _results(device, shape, goals, rates[0])
    return measured("linear", device, tuple(results), rates)


def _shapes(kind: str, name: str) -> Mapping[tuple[int, int, int], tuple[float | None, float | None]]:
    """The shapes for a device of this kind and name, with their targets."""
    if kind != "cuda":
        return {_CPU_SHAPE: (_CPU_GOAL, None)}
    return _H200_SHAPES if name == "NVIDIA H200" else _GPU_SHAPES


def _results(
    device: torch.device,
    shape: tuple[int, int, int],
    goals: tuple[float | None, float | None],
    bandwidth: float,
) -> list[Result]:
    tokens, columns, rows = shape
    x = normal(tokens, columns, device=device).to(torch.bfloat16)
    dy = normal(tokens, rows, device=device, seed=1).to(torch.bfloat16)
    size = "x".join(map(str, shape))
    recipes = {
        f"{size} nvfp4": (_everywhere("nvfp4"), goals[0], True),
        f"{size} nvfp4, amax supplied": (with_delayed_amax(_everywhere("nvfp4")), goals[1], False),
        f"{size} fp8": (_everywhere("fp8"), None, False),
    }
    bf16 = torch.compile(_linear(columns, rows, device))
    layers = [_converted(r, columns, rows, device) for r, _, _ in recipes.values()]
    for layer in layers:
        _step(layer, x, dy)()
        set_step(layer, 1)  # from the second step on, the amax policy supplies amaxes
    steps = [_step(layer, x, dy) for layer in (bf16, *layers)]
    base, *times = medians(steps, device, repeats=15, ahead=True)
    hosts = host_medians(steps, device) if device.type == "cuda" else [None] * len(steps)
    results = [Result(name=f"{size} bf16", seconds=base, value=1.0, unit=_UNIT, host_seconds=hosts[0])]
    for (name, (_, goal, own_amax)), seconds, host in zip(recipes.items(), times, hosts[1:], strict=True):
        ceiling = base / (base + _quantized_bytes(shape, own_amax) / bandwidth) if "nvfp4" in name else None
        results.append(
            Result(
                name=name,
                seconds=seconds,
                value=base / seconds,
                unit=_UNIT,
                goal=goal,
                ceiling=ceiling,
                host_seconds=host,
            )
        )
    return results


def _quantized_bytes(shape: tuple[int, int, int], own_amax: bool) -> float:
    """Fewest bytes of quantization: both operands of X and of dY in a single pass, W once, and amax passes.

    The BF16 layer also reads W in FP32 and writes it in BF16, which is subtracted.
    """
    tokens, columns, rows = shape
    activations = tokens * (columns + rows)
    return activations * (8.0 if own_amax else 6.0) + columns * rows * (4.0 if own_amax else 0.0)


def _step(layer: nn.Module | Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Callable[[], object]:
    """Forward and backward with gradients of both inputs, not accumulated.

    x is a new tensor each time, as in training, so that cached operands are not reused.
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
    """A shipped recipe that keeps no layer in BF16."""
    return replace(get_recipe(name), keep_bf16=KeepBF16(names=()))


def with_delayed_amax(recipe: Recipe) -> Recipe:
    """The recipe with every amax from the previous step, as if the tensor's producer supplied it."""

    def delayed(spec: OperandSpec) -> OperandSpec:
        return replace(spec, amax_policy="delayed")

    def both(gemm: GemmSpec) -> GemmSpec:
        return GemmSpec(lhs=delayed(gemm.lhs), rhs=delayed(gemm.rhs))

    return replace(recipe, fprop=both(recipe.fprop), dgrad=both(recipe.dgrad), wgrad=both(recipe.wgrad))
