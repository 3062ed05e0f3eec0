"""Measures a GPU for its report: bytes, sums, random rounding, speed."""

import platform
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType, scaled_mm

from fourbits.bench.native_report.cases import CASES, Case, operand_hash, operands, output_hash, sampled_bits
from fourbits.bench.timing import copy_bandwidth, host_medians, medians, normal, product_rate
from fourbits.device import Device, unsupported_fp4
from fourbits.gemm.matmul import matmul
from fourbits.gemm.native import self_check
from fourbits.gemm.native.sums_check import examine_sums
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.version import VERSION

#: version of a report's format; a change of `cases` needs a new one
FORM = 2
#: tokens, in_features and out_features of the timings, by kind of device
_TIMED = {"cuda": (8192, 4096, 4096), "cpu": (256, 256, 256)}
_SPECS = {
    "row": (OperandSpec(), 1),
    "row, stochastic": (OperandSpec(rounding="sr"), 1),
    "16x16": (OperandSpec(block=(16, 16)), 1),
    "column, RHT": (OperandSpec(rht=16), 0),
}


def report(device: Device, multiply: self_check.Product | None = None) -> dict[str, Any]:
    """The content of a report, as plain data. Takes about a minute on a GPU.

    multiply: replaces the GEMM of the FP4 tensor cores, or of the emulation on a GPU without them.
    """
    blocker, target = unsupported_fp4(device), torch.device(device.torch_device)
    gemm = multiply or (matmul if blocker else self_check.NATIVE)
    found = self_check.check_native(target, gemm)
    return {
        "form": FORM,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "fourbits": VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": asdict(device),
        "cuda": torch.version.cuda,
        "driver": _driver(target),
        "product": "emulated" if blocker else "native",
        "why_emulated": blocker,
        "self_check": [finding._asdict() for finding in found],
        "sums": attempted(lambda: _sums(target, gemm)),
        "gemms": {case.name: attempted(lambda case=case: _gemm(case, target, gemm)) for case in CASES},
        "speed": attempted(lambda: _speed(target, gemm, native=blocker is None)),
    }


def attempted(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a part measures, or {"error": text}: a chip that fails in one part still gets its report."""
    try:
        return measure()
    except Exception as error:  # noqa: BLE001 - nobody has seen yet how a chip may fail
        return {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}


def _sums(device: torch.device, multiply: self_check.Product) -> dict[str, Any]:
    sums = examine_sums(device, multiply)
    return {**sums._asdict(), "unlike": list(sums.unlike)}


def _gemm(case: Case, device: torch.device, multiply: self_check.Product) -> dict[str, Any]:
    """Hashes of a GEMM's operands and of its FP32 result, and the bits of some outputs."""
    a, b = operands(case, device)
    out = multiply(a, b, torch.float32, None)
    return {
        "lhs": operand_hash(a),
        "rhs": operand_hash(b),
        "out": output_hash(out),
        "samples": sampled_bits(out),
    }


def _fp8_product(x: Tensor, weight: Tensor) -> Callable[[], Tensor] | None:
    """X W^T by FP8 tensor cores (sm_89 and newer), scales per tensor; None for a device without them."""
    if x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) < (8, 9):
        return None
    a, b = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).t()
    one = torch.ones((), dtype=torch.float32, device=x.device)
    whole = ScalingType.TensorWise
    return lambda: scaled_mm(a, b, one, whole, one, whole, output_dtype=torch.bfloat16)


def _speed(device: torch.device, multiply: self_check.Product, native: bool) -> dict[str, Any]:
    """Times, and rates of the same run. Ratios to BF16 and FP8 come from interleaved calls."""
    tokens, inputs, outputs = _TIMED[device.type]
    x = normal(tokens, inputs, device=device).to(torch.bfloat16)
    weight = normal(outputs, inputs, device=device, seed=1).to(torch.bfloat16)
    key = torch.tensor([0, 0, 0, 0, 0], dtype=torch.int64, device=device)
    quantizers: dict[str, Callable[[], object]] = {
        name: lambda spec=spec, axis=axis: quantize(x, spec, axis, sr_key=key if spec.stochastic else None)
        for name, (spec, axis) in _SPECS.items()
    }
    times = medians([*quantizers.values()], device, cold=True, ahead=True)
    a, b = quantize(x, OperandSpec(), 1), quantize(weight, OperandSpec(), 1)
    fp8 = _fp8_product(x, weight)
    products = [lambda: multiply(a, b, torch.bfloat16, None), lambda: x @ weight.t(), *([fp8] if fp8 else ())]
    gemms = medians(products, device, ahead=True)
    return {
        "shape": [tokens, inputs, outputs],
        "copy_bytes_per_second": copy_bandwidth(device),
        "bf16_flops_per_second": product_rate(device),
        "quantize_seconds": dict(zip(quantizers, times, strict=True)),
        "gemm_seconds": {"fp4": gemms[0], "bf16": gemms[1], "fp8": gemms[2] if fp8 else None},
        "linear_step_seconds": _linear_step(device, native),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def _linear_step(device: torch.device, native: bool) -> dict[str, float]:
    """Times of a linear layer, forward and backward, by recipe, and of nvfp4's part on the host.

    The GEMMs of fp8 multiply its operands in BF16.
    """
    tokens, inputs, outputs = _TIMED[device.type]
    dy = normal(tokens, outputs, device=device, seed=2).to(torch.bfloat16)
    runs: list[Callable[[], object]] = []
    for recipe in ("nvfp4", "bf16", "fp8"):
        layer = nn.Linear(inputs, outputs, bias=False, device=device, dtype=torch.float32)
        model = nn.ModuleDict({"layer": layer})
        if recipe != "bf16":
            convert(model, recipe, backend="native" if native and recipe == "nvfp4" else "emulated")
            set_step(model, 0)
        x = normal(tokens, inputs, device=device).to(torch.bfloat16).requires_grad_()

        def step(layer: nn.Linear = layer, x: torch.Tensor = x) -> None:
            with torch.autocast(device.type, torch.bfloat16):
                y = layer(x)
            y.backward(dy)

        runs.append(step)
    seconds = medians(runs, device)
    host = host_medians(runs[:1], device, repeats=10)[0] if device.type == "cuda" else seconds[0]
    return {"nvfp4": seconds[0], "bf16": seconds[1], "fp8": seconds[2], "nvfp4_host": host}


def _driver(device: torch.device) -> str | None:
    """The version of the CUDA driver, as torch knows it."""
    if device.type != "cuda":
        return None
    return str(torch._C._cuda_getDriverVersion())  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
