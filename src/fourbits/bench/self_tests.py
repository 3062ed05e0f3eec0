"""Self-tests of a device's kernels against references on the CPU, and the device's measured rates.

Compilers and libraries have silently produced wrong gradients on new GPUs. Each test is small; most of its
time goes into compiling, so tests of a GPU run in parallel, in processes of their own. A test begins only
while the time for all of them lasts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fourbits.bench.experts import converted_experts
from fourbits.bench.processes import Limits, Lost, call_in_processes, useful_processes
from fourbits.bench.timing import copy_bandwidth, product_rate
from fourbits.device import Device, unsupported_fp4, unsupported_triton
from fourbits.gemm.grouped import unsupported_grouped_gemms
from fourbits.gemm.matmul import gemm, matmul
from fourbits.gemm.native.self_check import Finding
from fourbits.gemm.native.self_check import checks as checks_of_gemms
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.model.ops.errors import error_shares
from fourbits.model.ops.self_check import checks as checks_of_mamba
from fourbits.model.ops.ssd.op import unsupported as unsupported_scan
from fourbits.plan.gpus import GPUS
from fourbits.quant.quantize import Operand, quantizer
from fourbits.quant.request import OperandInputs, OperandRequest, signature_of
from fourbits.quant.tensor import ExactOperand, spread
from fourbits.recipe.presets import get_recipe

#: seconds within which tests begin
BUDGET = 30.0
#: seconds in which a test in a separate process must end, with the start of the process
_LIMIT = 120.0
#: of the paper's hybrids: channels of a head of the scan, and rows of its state
_HEAD = (64, 128)
#: an error that sums in FP8 tensor cores may have, as a share of the sum of magnitudes (docs/nvfp4.md, 16)
_FP8_SUM = 132 * 2.0**-13
#: relative error between two orders of summation, in BF16 results of FP32 sums
_ORDER = 2.0**-7

Result = tuple[bool, str]
#: (name, why it cannot run here, the test)
Tests = list[tuple[str, str | None, Callable[[], Result]]]
#: what a part of a check found
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The result of a test. passed: None if it did not run, for the reason in detail."""

    what: str
    passed: bool | None
    detail: str
    seconds: float


def rates(device: torch.device, described: Device) -> dict[str, str]:
    """Memory and BF16 GEMM rates, measured, beside the declared ones where they are known."""
    copy, product = copy_bandwidth(device), product_rate(device)
    known = next((gpu for gpu in GPUS.values() if gpu.device == described.name), None)
    of_memory = "" if known is None else f", {copy / known.bandwidth:.2f} of the declared rate"
    of_peak = "" if known is None else f", {product / known.bf16_peak:.2f} of the declared peak"
    return {
        "memory, measured": f"{copy / 1e9:,.0f} GB/s read and written{of_memory}",
        "BF16 GEMM, measured": f"{product / 1e12:,.2f} TFLOP/s{of_peak}",
    }


def self_tests(described: Device, budget: float = BUDGET, processes: int | None = None) -> list[SelfTest]:
    """Every test: has it passed, and if it did not run, why.

    processes: tests that run at a time, each in a separate process; default: for a GPU, one per core unless
    they are few. One process is this one.
    """
    tests = _tests(torch.device(described.torch_device), described)
    names = [what for what, unsupported, _ in tests if unsupported is None]
    count = processes or (1 if described.torch_device == "cpu" else useful_processes())
    if count > 1:
        run = partial(_run_test, described)
        found = call_in_processes(run, names, min(count, len(names)), Limits(budget, _LIMIT), _failed)
    else:
        found = _in_turn({what: run for what, _, run in tests}, names, budget)
    late = f"the time for all tests, {budget:.0f} s, is used up"
    results = list[SelfTest]()
    for what, unsupported, _ in tests:
        result = found.get(what, SelfTest(what, None, unsupported or late, 0.0))
        if isinstance(result, Lost):
            result = SelfTest(what, False, result.reason, result.seconds)
        results.append(result)
    return results


def _in_turn(tests: dict[str, Callable[[], Result]], names: list[str], budget: float) -> dict[str, SelfTest]:
    """The tests that begin in time, in this process."""
    began, found = time.monotonic(), dict[str, SelfTest]()
    for what in names:
        if time.monotonic() - began > budget:
            break
        found[what] = _timed(what, tests[what])
    return found


def _run_test(described: Device, name: str) -> SelfTest:
    """One test, found by its name: in another process, to which functions of a device cannot be sent."""
    tests = _tests(torch.device(described.torch_device), described)
    return next(_timed(what, run) for what, _, run in tests if what == name)


def _timed(what: str, run: Callable[[], Result]) -> SelfTest:
    start = time.monotonic()
    passed, detail = _result(run)
    return SelfTest(what, passed, detail, time.monotonic() - start)


def _failed(test: SelfTest) -> bool:
    """Whether a process must not be used again: after a wrong address, CUDA fails in every later call."""
    return test.passed is False


def _tests(device: torch.device, described: Device) -> Tests:
    """Every test of a device. Checks of several kernels are a test per part, which compile in parallel.

    Those that compile nothing come first, so that a slow compiler does not cost them.
    """
    triton = unsupported_triton(described) if device.type == "cuda" else None
    kernels = unsupported_triton(described)
    alone = "on a CPU it is the reference itself" if device.type == "cpu" else triton
    scan = unsupported_scan(device, torch.bfloat16, *_HEAD)
    return [
        ("attention", None, lambda: _attention(device)),
        *_parts("quantizers and emulated GEMMs", triton, checks_of_gemms(device, matmul), _findings),
        ("linear layer, nvfp4", alone, lambda: _linear(device)),
        *_parts("Mamba-2", scan, checks_of_mamba(device, torch.bfloat16, *_HEAD), _shares),
        ("FP8 GEMM", kernels, lambda: _fp8(device)),
        ("experts", alone or unsupported_grouped_gemms(device), lambda: _experts(device)),
        ("CUDA graph", kernels, lambda: _graph(device)),
        *_parts("FP4 tensor cores", unsupported_fp4(described), checks_of_gemms(device), _findings),
    ]


def _parts(
    what: str, unsupported: str | None, parts: dict[str, Callable[[], P]], judge: Callable[[P], Result]
) -> Tests:
    """A test per part, or one with the reason why none can run."""

    def judged(part: Callable[[], P]) -> Callable[[], Result]:
        return lambda: judge(part())

    if unsupported is not None:
        return [(what, unsupported, lambda: (False, unsupported))]
    return [(f"{what}: {name}", None, judged(part)) for name, part in parts.items()]


def _result(run: Callable[[], Result]) -> Result:
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - libraries and compilers raise any type of error on a new GPU
        lines = [line for line in str(error).splitlines() if line.strip()]
        return False, f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _findings(found: tuple[Finding, ...]) -> Result:
    wrong = [f"{each.what}: {each.detail}" for each in found if not each.passed]
    return not wrong, "; ".join(wrong) or f"{len(found)} checks of bytes and sums"


def _shares(found: dict[str, float]) -> Result:
    worst = max(found, key=lambda name: found[name])
    return all(share <= 1.0 for share in found.values()), f"{found[worst]:.2f} of the allowed error ({worst})"


def _random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _attention(device: torch.device) -> Result:
    """Causal, four heads of queries on two of keys, against FP64."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    args = tuple(_random(2, heads, 192, 64, seed=heads).bfloat16() for heads in (4, 2, 2))
    return _shares(error_shares(("y", "dq", "dk", "dv"), attend, attend, args, device))


def _linear(device: torch.device) -> Result:
    """Forward and backward with all techniques; codes are the CPU's, and sums have another order."""

    def run(where: torch.device) -> list[Tensor]:
        linear = nn.Linear(192, 96, bias=False, device=where, dtype=torch.float32)
        with torch.no_grad():
            linear.weight.copy_(_random(96, 192, seed=1) * 0.1)
        layer = nn.Sequential(linear)
        convert(layer, "nvfp4", keep_first=0, keep_last=0)
        set_step(layer, 1)
        return _gradients_of(layer, layer, _random(80, 192, seed=2), _random(80, 96, seed=3), where)

    return _agree(run, device)


def _experts(device: torch.device) -> Result:
    """Three experts with 16, 48 and 0 tokens, in one launch per GEMM."""

    def run(where: torch.device) -> list[Tensor]:
        layer = converted_experts(_random(3, 96, 192, seed=4).to(where) * 0.1)
        ends = torch.tensor([16, 64, 64], dtype=torch.int32, device=where)
        x, dy = _random(64, 192, seed=5), _random(64, 96, seed=6)
        return _gradients_of(layer, lambda rows: layer(rows, ends), x, dy, where)

    return _agree(run, device)


def _gradients_of(
    layer: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, where: torch.device
) -> list[Tensor]:
    """y, dx and dW of a layer, on the CPU, FP32."""
    x = x.bfloat16().to(where).requires_grad_()
    y = call(x)
    y.backward(dy.bfloat16().to(where))
    (weight,) = layer.parameters()
    assert x.grad is not None
    assert weight.grad is not None
    return [tensor.detach().float().cpu() for tensor in (y, x.grad, weight.grad)]


def _agree(run: Callable[[torch.device], list[Tensor]], device: torch.device) -> Result:
    here, there = run(torch.device("cpu")), run(device)
    errors = {
        name: float((a - b).norm() / a.norm()) / _ORDER
        for name, a, b in zip(("y", "dx", "dw"), here, there, strict=True)
    }
    return _shares(errors)


def _fp8(device: torch.device) -> Result:
    """Operands of recipe fp8, against the exact product of their values."""
    fprop = get_recipe("fp8").fprop
    operands, values = list[Operand](), list[Tensor]()
    for rows, spec in ((80, fprop.lhs), (128, fprop.rhs)):
        x = _random(rows, 256, seed=rows).bfloat16().to(device)
        (operand,) = quantizer(signature_of(x), (OperandRequest(spec, 1),))(x, (OperandInputs(),), None)
        assert isinstance(operand, ExactOperand)
        scale = operand.scale
        scale = spread(scale, operand.scale_block, operand.values.shape) if scale.dim() else scale
        operands.append(operand)
        values.append((operand.values.float() * scale).double().cpu())
    found = gemm(operands[0], operands[1], torch.bfloat16, None)(*operands, None).double().cpu()
    a, b = values
    allowed = (_FP8_SUM + 2.0**-8) * (a.abs() @ b.abs().t())
    return _shares({"y": float(((found - a @ b.t()).abs() / allowed).max())})


def _graph(device: torch.device) -> Result:
    """A replay after the inputs changed computes what a call does."""
    x, w = (_random(64, 64, seed=seed).bfloat16().to(device) for seed in (9, 10))
    y = x @ w
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x @ w
    x.copy_(w)
    graph.replay()
    same = torch.equal(y, w @ w)
    return same, "a replay reads new inputs" if same else "a replay has other bits than a call"
