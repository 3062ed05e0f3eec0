"""Speed of the quantizers relative to a copy: bytes read and written per second, over copy bandwidth."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fourbits.bench.peers.quantize import quantize_peers
from fourbits.bench.timing import (
    Measurements,
    Result,
    copy_bandwidth,
    measured,
    median_seconds,
    medians,
    normal,
    product_rate,
)
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import exact_operand, quantize, quantizer
from fourbits.quant.request import OperandInputs, OperandRequest, signature_of

_UNIT = "of copy bandwidth"
_ROW, _ROW_SR = OperandSpec(), OperandSpec(rounding="sr")
_COLUMN, _COLUMN_SR = OperandSpec(rht=16), OperandSpec(rounding="sr", rht=16)
_BLOCK_2D = OperandSpec(block=(16, 16), source="bf16")
_FP8 = OperandSpec(format="fp8")
#: bytes per packed 4-bit element, including its share of a block scale
_PACKED = 0.5 + 1 / 16
#: target speedups by peer and version
_PEER_GOALS = {"torchao 0.18.0": 20.0, "fouroversix 0.1.0": 15.0}
_GPU_SHAPE, _CPU_SHAPE = (8192, 4096), (2048, 4096)


def bench_quantize(device: torch.device) -> Measurements:
    """Measure the quantizers on a device: fused kernels on a GPU, the compiled reference elsewhere."""
    rates = copy_bandwidth(device), product_rate(device)
    results = _gpu_results(device, rates[0]) if device.type == "cuda" else _cpu_results(device, rates[0])
    return measured("quantize", device, results, rates)


def _gpu_results(device: torch.device, bandwidth: float) -> tuple[Result, ...]:
    x = normal(*_GPU_SHAPE, device=device).to(torch.bfloat16)
    w = normal(4096, 4096, device=device, seed=1)
    key = torch.tensor([1, 2, 3, 4, 5], device=device, dtype=torch.int64)
    amax = x.float().abs().amax()
    row, column = OperandRequest(_ROW, 1), OperandRequest(_COLUMN, 0)
    row_sr, column_sr = OperandRequest(_ROW_SR, 1), OperandRequest(_COLUMN_SR, 0)

    def result(
        name: str, run: Callable[[], object], of: Tensor, per_element: float, goal: float | None = None
    ) -> Result:
        seconds = median_seconds(run, device)
        value = of.numel() * per_element / seconds / bandwidth
        return Result(name=name, seconds=seconds, value=value, unit=_UNIT, goal=goal, ceiling=1.0)

    def given(*requests: OperandRequest, packed: bool = False) -> Callable[[], object]:
        return _quantizing(x, tuple(r._replace(amax="given", packed=packed) for r in requests), key, amax)

    def own(of: Tensor, *requests: OperandRequest) -> Callable[[], object]:
        return _quantizing(of, requests, key, None)

    fp8 = OperandRequest(_FP8, 1), OperandRequest(_FP8, 0)
    return (
        result("row, to nearest", given(row), x, 4, 0.80),
        result("row, stochastic", given(row_sr), x, 4),
        result("row and column with RHT, to nearest", given(row, column), x, 6, 0.70),
        result("row and column with RHT, stochastic", given(row_sr, column_sr), x, 6, 0.45),
        result("row and column with RHT, to nearest, own amax", own(x, row, column), x, 8),
        result("row and column with RHT, stochastic, own amax", own(x, row_sr, column_sr), x, 8),
        result("weight 16x16 from FP32, own amax", own(w, OperandRequest(_BLOCK_2D, 1)), w, 10),
        result("row, packed", given(row, packed=True), x, 2 + _PACKED, 0.50),
        result("column with RHT, packed", given(column, packed=True), x, 2 + _PACKED, 0.35),
        result("FP8 row and column", own(x, *fp8), x, 4, 0.60),
    )


def _quantizing(
    x: Tensor, requests: tuple[OperandRequest, ...], key: Tensor, amax: Tensor | None
) -> Callable[[], object]:
    """A call that computes these operands in a single pass."""
    quantize, inputs = quantizer(signature_of(x), requests), (OperandInputs(key, 0, amax),) * len(requests)
    return lambda: quantize(x, inputs, None)


def _cpu_results(device: torch.device, bandwidth: float) -> tuple[Result, ...]:
    x = normal(*_CPU_SHAPE, device=torch.device("cpu")).to(torch.bfloat16)
    key = torch.tensor([1, 2, 3, 4, 5], dtype=torch.int64, device="cpu")

    def result(name: str, spec: OperandSpec, axis: int, packed: bool) -> Result:
        make = quantize if packed else exact_operand
        seconds = median_seconds(lambda: make(x, spec, axis, sr_key=key), device)
        moved = x.numel() * (4 + _PACKED if packed else 6)
        return Result(name=name, seconds=seconds, value=moved / seconds / bandwidth, unit=_UNIT, ceiling=1.0)

    return (
        result("row, to nearest, own amax, packed", _ROW, 1, True),
        result("row, to nearest, own amax", _ROW, 1, False),
        result("row, stochastic, own amax", _ROW_SR, 1, False),
        result("column with RHT, to nearest, own amax", _COLUMN, 0, False),
        result("column with RHT, stochastic, own amax", _COLUMN_SR, 0, False),
        result("square, to nearest, own amax", replace(_BLOCK_2D, source="as_is"), 1, False),
        *_peer_results(x, device),
    )


def _peer_results(x: Tensor, device: torch.device) -> list[Result]:
    """Speedup over each installed peer: packed, with a measured amax, calls alternating."""
    results: list[Result] = []
    for name, theirs in quantize_peers(x).items():
        own, peer = medians([lambda: quantize(x, _ROW), theirs], device, repeats=10)
        goal = _PEER_GOALS.get(name)
        results.append(Result(name=name, seconds=peer, value=peer / own, unit="times as long", goal=goal))
    return results
