"""Cost of an FP4 tensor core's sums (`sums: sm_100`) relative to a GEMM of the same operands in BF16.

Where the operands' extents prove it, an instruction is one BF16 dot and one addition; elsewhere it takes 4
dots in FP64, or every term (docs/nvfp4.md, 22.4). How many tiles are proven is a property of the data, so
operands are also recorded in training.
"""

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.bench.processes import Limits, call_in_processes, useful_processes
from fourbits.bench.recorded_operands import Recorded, Shape, recorded, shapes
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

#: (tokens, in_features, out_features)
_SHAPES = {"cuda": (8192, 4096, 4096), "cpu": (64, 256, 128)}
#: width, tokens and steps of the model whose operands are recorded
_MODEL = {"cuda": (1024, 8192, 60), "cpu": (64, 64, 2)}
_GOAL = 0.5
_REPEATS = 10
_RECIPE = get_recipe("nvfp4")
#: contraction axes of both operands of each GEMM
_AXES = {"fprop": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}
#: of processes that compile: seconds in which calls begin, and end; bytes of the GPU's memory for each
_LIMITS = Limits(begin=60.0, end=120.0)
_PROCESS_BYTES = 4 << 30


def bench_sums(device: torch.device) -> Measurements:
    """Measure GEMMs with sums of sm_100: Gaussian operands, spread and random block scales, recorded ones."""
    rates = copy_bandwidth(device), product_rate(device)
    with _compiling(device):
        layers = recorded(device, _RECIPE, *_MODEL[device.type])
    results = [_result(name, a, b, torch.float32, goal) for name, (a, b), goal in _made(device)]
    for layer in layers:
        for gemm_name in _AXES:
            name = f"recorded {layer.name}, {gemm_name}"
            results.append(_result(name, *_operands(layer, gemm_name), _dtype(gemm_name), None))
    return measured("sums", device, tuple(results), rates)


class Part(NamedTuple):
    """A GEMM that will be measured: of recorded layers of a shape, or of the made operands."""

    shape: Shape | None
    gemm_name: str


@contextmanager
def _compiling(device: torch.device) -> Generator[None]:
    """While this process executes what is not timed, others compile the GEMMs that will be measured."""
    count = 1 if device.type == "cpu" else min(useful_processes(), _memory(device) // _PROCESS_BYTES)
    if count <= 1:
        yield
        return
    with ThreadPoolExecutor(1) as thread:
        compiled = thread.submit(call_in_processes, partial(_compile, device), _parts(device), count, _LIMITS)
        yield
    compiled.result()


def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def _parts(device: torch.device) -> list[Part]:
    layers = shapes(_RECIPE, _MODEL[device.type][0])
    return [Part(None, "fprop"), *(Part(shape, name) for shape in layers for name in _AXES)]


def _compile(device: torch.device, part: Part) -> None:
    """Compute a GEMM once, of random numbers, which leaves its kernels in the compiler's cache."""
    with suppress(torch.OutOfMemoryError):  # the measuring process will compile them
        if part.shape is None:
            _, operands, _ = _made(device)[0]
            dtype = torch.float32
        else:
            rows, (out, length) = _MODEL[device.type][1], part.shape
            x, weight, dy = (
                normal(*size, device=device) for size in ((rows, length), (out, length), (rows, out))
            )
            operands = _operands(Recorded("", x.bfloat16(), weight, dy.bfloat16()), part.gemm_name)
            dtype = _dtype(part.gemm_name)
        for run in _runs(*operands, dtype):
            run()


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


def _operands(layer: Recorded, gemm_name: str) -> tuple[QuantizedTensor, QuantizedTensor]:
    """The operands of one of a layer's three GEMMs."""
    key = torch.tensor([0, 0, 0, 0, 0], device=layer.x.device, dtype=torch.int64)
    sides = {
        "fprop": (layer.x, layer.weight),
        "dgrad": (layer.dy, layer.weight),
        "wgrad": (layer.dy, layer.x),
    }
    specs = [_RECIPE.table.operand(f"{gemm_name}.{side}") for side in ("lhs", "rhs")]
    a, b = (
        quantize(t, replace(spec, source="as_is") if spec.source == "forward" else spec, axis, sr_key=key)
        for t, spec, axis in zip(sides[gemm_name], specs, _AXES[gemm_name], strict=True)
    )
    return a, b


def _dtype(gemm_name: str) -> torch.dtype:
    return torch.float32 if gemm_name == "wgrad" else torch.bfloat16


def _runs(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> list[Callable[[], object]]:
    """The GEMM of the operands' values in BF16, and the GEMM from codes with the sums."""
    values = exact(a), exact(b)
    plain, modelled = gemm(*values, dtype, None), gemm(a, b, dtype, None, "sm_100")
    return [lambda: plain(*values, None), lambda: modelled(a, b, None)]


def _result(
    name: str, a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, goal: float | None
) -> Result:
    """Time the GEMM from codes with these sums, alternating with the GEMM of the same values in BF16."""
    bf16, ours = medians(_runs(a, b, dtype), a.codes.device, _REPEATS, ahead=True)
    short, exactly, every = shares_of_paths(a, b, "sm_100")
    shares = f"of BF16; tiles {short:.0%} short, {exactly:.0%} exact, {every:.0%} every term"
    return Result(name=name, seconds=ours, value=bf16 / ours, unit=shares, goal=goal)
