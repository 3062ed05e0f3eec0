"""Cost of an FP4 tensor core's sums (`sums: sm_100`) relative to a GEMM of the same operands in BF16.

Where the operands' extents prove it, an instruction is one BF16 dot and one addition; elsewhere it takes 4
dots in FP64, or every term (docs/nvfp4.md, 22.4). How many tiles are proven is a property of the data, so
operands are also recorded in training.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fourbits.bench.recorded_operands import Recorded, recorded
from fourbits.bench.timing import (
    Measurements,
    Result,
    copy_bandwidth,
    measured,
    medians,
    normal,
    product_rate,
)
from fourbits.gemm.matmul import gemm
from fourbits.gemm.sums import shares_of_paths
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import exact, quantize
from fourbits.quant.tensor import QuantizedTensor
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import GemmTable

#: (tokens, in_features, out_features)
_SHAPES = {"cuda": (8192, 4096, 4096), "cpu": (64, 256, 128)}
#: width, tokens and steps of the model whose operands are recorded
_MODEL = {"cuda": (1024, 8192, 60), "cpu": (64, 64, 2)}
_GOAL = 0.5
_REPEATS = 10


def bench_sums(device: torch.device) -> Measurements:
    """Measure GEMMs with sums of sm_100: Gaussian operands, spread and random block scales, recorded ones."""
    rates = copy_bandwidth(device), product_rate(device)
    results: list[Result] = []
    for name, (a, b), goal in _made(device):
        results.append(_result(name, a, b, torch.float32, goal))
    table = get_recipe("nvfp4").table
    for layer in recorded(device, get_recipe("nvfp4"), *_MODEL[device.type]):
        for name, a, b in _gemms(layer, table):
            dtype = torch.float32 if name == "wgrad" else torch.bfloat16
            results.append(_result(f"recorded {layer.name}, {name}", a, b, dtype, None))
    return measured("sums", device, tuple(results), rates)


def _made(device: torch.device) -> list[tuple[str, tuple[QuantizedTensor, QuantizedTensor], float | None]]:
    """Normal numbers; the same with a block of each row far above the others; any scale bytes."""
    tokens, width, outputs = _SHAPES[device.type]
    x, w = (
        normal(rows, width, device=device, seed=seed) for seed, rows in enumerate((tokens, outputs), start=1)
    )
    a, b = quantize(x, OperandSpec()), quantize(w, OperandSpec(block=(16, 16)))
    spread = x.clone()
    spread[:, ::64] *= 128.0
    far = quantize(spread, OperandSpec())
    wild = [replace(q, block_scale=_any_scales(q.block_scale, seed)) for seed, q in enumerate((a, b))]
    shape = f"{tokens}x{width}x{outputs}"
    return [
        (f"{shape}, normal", (a, b), _GOAL),
        (f"{shape}, one value of 64 128 times larger", (far, b), None),
        (f"{shape}, random scales", (wild[0], wild[1]), None),
    ]


def _any_scales(scales: Tensor, seed: int) -> Tensor:
    """Any E4M3 numbers of this shape."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randint(0, 127, scales.shape, generator=generator, dtype=torch.uint8, device="cpu")
    return drawn.to(scales.device).view(scales.dtype)


def _gemms(layer: Recorded, table: GemmTable) -> Iterator[tuple[str, QuantizedTensor, QuantizedTensor]]:
    """The three GEMMs of a layer: their names and operands."""
    key = torch.tensor([0, 0, 0, 0, 0], device=layer.x.device, dtype=torch.int64)
    for name, left, right, axes in (
        ("fprop", layer.x, layer.weight, (1, 1)),
        ("dgrad", layer.dy, layer.weight, (1, 0)),
        ("wgrad", layer.dy, layer.x, (0, 0)),
    ):
        specs = (table.operand(f"{name}.{side}") for side in ("lhs", "rhs"))
        a, b = (
            quantize(t, replace(spec, source="as_is") if spec.source == "forward" else spec, axis, sr_key=key)
            for t, spec, axis in zip((left, right), specs, axes, strict=True)
        )
        yield name, a, b


def _result(
    name: str, a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, goal: float | None
) -> Result:
    """The GEMM from codes with these sums, in turns with the GEMM of the same values in BF16."""
    values = exact(a), exact(b)
    plain = gemm(*values, dtype, None)
    modelled = gemm(a, b, dtype, None, "sm_100")
    runs = [lambda: plain(*values, None), lambda: modelled(a, b, None)]
    bf16, ours = medians(runs, a.codes.device, _REPEATS, ahead=True)
    short, exactly, every = shares_of_paths(a, b, "sm_100")
    shares = f"of BF16; tiles {short:.0%} short, {exactly:.0%} exact, {every:.0%} every term"
    return Result(name=name, seconds=ours, value=bf16 / ours, unit=shares, goal=goal)
