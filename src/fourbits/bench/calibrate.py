"""Measure a machine for `fourbits plan --calibration`: memory, GEMMs, quantizers, attention, scan, link.

The calls are those of training: quantization of linear layers' operands, and forward and backward passes of
attention and scan. On a GPU they run back to back for a while, after a warm-up of seconds, because a GPU that
is always busy runs at lower clocks: large GEMMs on an H200 run at 0.70 of the peak, and at 0.80 for the first
tenth of a second. It takes less than a minute, most of it compiling.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fourbits.bench.ssd import both_passes, scan_arguments
from fourbits.bench.timing import copy_bandwidth, median_seconds, normal, product_rate
from fourbits.device import probe, unsupported_fp4
from fourbits.gemm.matmul import gemm
from fourbits.gemm.native.self_check import NATIVE
from fourbits.model.counts import training_flops
from fourbits.model.linear import gemm_operand
from fourbits.model.ops.self_check import use_kernels
from fourbits.model.ops.ssd.op import ssd
from fourbits.model.presets import MODEL_PRESETS
from fourbits.plan.calibration import Calibration, GemmTime, GemmUnit
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import Operand, quantize, quantizer
from fourbits.quant.request import OperandInputs, OperandRequest, signature_of
from fourbits.recipe.presets import get_recipe
from fourbits.train.ranks.ranks import Ranks
from fourbits.version import VERSION

Log = Callable[[str], None]
#: seconds of GEMMs before the first measurement, and seconds per measurement
_WARM_UP, _LONG = 3.0, 0.4


@dataclass(frozen=True, slots=True)
class Sizes:
    """The measured sizes: GEMMs (m, n, k), a tensor to quantize, attention (batch, tokens, heads, KV heads,
    channels of a head), a preset's scan (preset, batch, tokens), and numbers that each rank sends.
    """

    gemms: tuple[tuple[int, int, int], ...]
    quantized: tuple[int, int]
    attention: tuple[int, int, int, int, int]
    scan: tuple[str, int, int]
    sent: int
    repeats: int = 10


#: layers of models of 1.2B and 12B parameters: forward, input gradient, weight gradient; and a small model's
GPU_SIZES = Sizes(
    gemms=(
        (8192, 8192, 8192),
        (16384, 6144, 2048),
        (16384, 2048, 6144),
        (6144, 2048, 16384),
        (16384, 9280, 2048),
        (8192, 20480, 5120),
        (32768, 1792, 640),
    ),
    quantized=(8192, 4096),
    attention=(2, 8192, 16, 8, 128),
    scan=("hybrid-1.2b", 2, 8192),
    sent=1 << 25,
)
CPU_SIZES = Sizes(((256, 256, 256),), (256, 256), (1, 128, 4, 2, 32), ("tiny", 1, 64), 1 << 12, repeats=3)


def calibrate(ranks: Ranks, log: Log = lambda line: None) -> Calibration:
    """Measure this rank's device, and the links between ranks. All ranks must call it."""
    device = ranks.device
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    began = time.monotonic()
    missing: dict[str, str] = {}

    def report(what: str) -> None:
        log(f"{time.monotonic() - began:5.1f} s  {what}")

    _warm_up(device)
    copy = copy_bandwidth(device)
    report(f"memory {copy / 1e12:.3g} TB/s")
    gemms = _gemms(device, sizes, missing, report)
    nearest, stochastic = (_quantizer_rate(device, sizes, rounding) for rounding in ("rne", "sr"))
    report(f"quantizers {nearest / copy:.2g} (rne) and {stochastic / copy:.2g} (sr) of the memory's rate")
    attention = _attention_rate(device, sizes)
    report(f"attention {attention / 1e12:.3g} TFLOP/s")
    scan = _scan_rate(device, sizes, missing)
    link, world = _link_rate(ranks, sizes)
    if world == 1:
        missing["link"] = "one rank; start several with torchrun"
    described = probe(device)
    return Calibration(
        device=described.name,
        torch=described.torch_version,
        fourbits=VERSION,
        copy=copy,
        gemms=gemms,
        quantize=nearest,
        quantize_stochastic=stochastic,
        attention=attention,
        scan=scan,
        link=link,
        ranks=world,
        missing=missing,
    )


def _warm_up(device: torch.device) -> None:
    """Run a GPU until its clocks have settled."""
    end = time.monotonic() + _WARM_UP
    while device.type == "cuda" and time.monotonic() < end:
        product_rate(device)


def _sustained_seconds(run: Callable[[], object], device: torch.device, sizes: Sizes) -> float:
    """Mean time of a call in a long series of calls; on a CPU, the median of a few."""
    once = median_seconds(run, device, sizes.repeats, cold=False)
    if device.type != "cuda":
        return once
    calls = max(10, round(_LONG / once))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) * 1e-3 / calls


def _gemms(device: torch.device, sizes: Sizes, missing: dict[str, str], report: Log) -> tuple[GemmTime, ...]:
    """GEMM times at every shape, for every kind of tensor core that the device has."""
    units: dict[GemmUnit, Callable[[Tensor, Tensor], Callable[[], object]]] = {
        "bf16": _bf16_gemm,
        "emulated": lambda a, b: _operand_gemm("nvfp4", a, b),
        "fp8": lambda a, b: _operand_gemm("fp8", a, b),
    }
    if (blocker := unsupported_fp4(probe(device))) is None:
        units["nvfp4"] = _native_gemm
    else:
        missing["nvfp4"] = blocker
    found: list[GemmTime] = []
    for m, n, k in sizes.gemms:
        a, b = (normal(rows, k, device=device, seed=rows).to(torch.bfloat16) for rows in (m, n))
        for unit, call in units.items():
            seconds = _sustained_seconds(call(a, b), device, sizes)
            found.append(GemmTime(unit=unit, m=m, n=n, k=k, seconds=seconds))
            report(f"{unit} GEMM {m} x {n} x {k}: {found[-1].rate / 1e12:,.3g} TFLOP/s")
    return tuple(found)


def _bf16_gemm(a: Tensor, b: Tensor) -> Callable[[], object]:
    left, right = gemm_operand(a), gemm_operand(b).t()
    return lambda: left @ right


def _operand_gemm(recipe: str, a: Tensor, b: Tensor) -> Callable[[], object]:
    """A recipe's Fprop on operands that are already quantized."""
    fprop = get_recipe(recipe).fprop
    left, right = _operand(a, fprop.lhs), _operand(b, fprop.rhs)
    run = gemm(left, right, torch.bfloat16, None)
    return lambda: run(left, right, None)


def _native_gemm(a: Tensor, b: Tensor) -> Callable[[], object]:
    left, right = quantize(a, OperandSpec(), 1), quantize(b, OperandSpec(), 1)
    return lambda: NATIVE(left, right, torch.bfloat16, None)


def _operand(x: Tensor, spec: OperandSpec) -> Operand:
    (operand,) = quantizer(signature_of(x), (OperandRequest(spec, 1),))(x, (OperandInputs(),), None)
    return operand


def _quantizer_rate(device: torch.device, sizes: Sizes, rounding: str) -> float:
    """Bytes per second of both operands of a tensor with their amaxes: 8 per element, as nvfp4's X or dY."""
    recipe = get_recipe("nvfp4")
    of_x, of_dy = (recipe.fprop.lhs, recipe.wgrad.rhs), (recipe.dgrad.lhs, recipe.wgrad.lhs)
    row, column = of_x if rounding == "rne" else of_dy
    x = normal(*sizes.quantized, device=device).to(torch.bfloat16)
    key = torch.tensor([1, 2, 3, 4, 5], device=device, dtype=torch.int64)
    requests = OperandRequest(row, 1), OperandRequest(column, 0)
    quantize, inputs = quantizer(signature_of(x), requests), (OperandInputs(key, 0),) * 2
    return 8.0 * x.numel() / median_seconds(lambda: quantize(x, inputs, None), device, sizes.repeats)


def _attention_rate(device: torch.device, sizes: Sizes) -> float:
    """FLOPs per second of causal attention, forward and backward."""
    batch, tokens, heads, groups, channels = sizes.attention
    q, k, v = (
        normal(batch, n, tokens, channels, device=device, seed=n).to(torch.bfloat16).requires_grad_()
        for n in (heads, groups, groups)
    )
    dy = torch.ones_like(q)

    def run() -> object:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(y, (q, k, v), dy)

    flops = 12.0 * (tokens + 1) / 2 * heads * channels * batch * tokens
    return flops / _sustained_seconds(run, device, sizes)


def _scan_rate(device: torch.device, sizes: Sizes, missing: dict[str, str]) -> float | None:
    """FLOPs per second of the scan's kernels; None if they do not run here."""
    name, batch, tokens = sizes.scan
    model = MODEL_PRESETS[name]
    if not use_kernels(device, torch.bfloat16, model.mamba_head_dim, model.state_size):
        missing["scan"] = "the scan has no kernels here"
        return None
    args, dy = scan_arguments(model, (batch, tokens), device)

    def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return ssd(x, dt, a, b, c, d, model.chunk_size, fused=True)

    run = both_passes(scan, args, dy)
    flops = training_flops(model, tokens)["scan"] / model.pattern.count("M") * batch * tokens
    return flops / _sustained_seconds(run, device, sizes)


def _link_rate(ranks: Ranks, sizes: Sizes) -> tuple[float | None, int]:
    """Bytes per second that each rank receives in an all-gather, and the number of ranks."""
    values = torch.ones(sizes.sent, device=ranks.device, dtype=torch.float32)
    world = len(ranks.all(values[:1]))
    if world == 1:
        return None, 1
    seconds = median_seconds(lambda: ranks.all(values), ranks.device, sizes.repeats, cold=False)
    return 4.0 * sizes.sent * (world - 1) / seconds, world
