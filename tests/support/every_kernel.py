"""The launches of every kernel that fourbits has, as a GPU that is planned for would make them.

To be called within `planning_for` a compute capability; nothing is compiled yet.
"""

import importlib
import pkgutil
from collections.abc import Generator, Iterable

import torch
import triton

import fourbits
from fourbits.gemm.kernels import launch_chain, launch_fp8
from fourbits.gemm.kernels import launch_grouped as grouped_gemms
from fourbits.gemm.kernels.launch_bf16 import OperandLayout, bf16_gemm
from fourbits.gemm.kernels.tiles import gpu_model
from fourbits.linear.kernels import observe_triton
from fourbits.model.ops.add_norm.kernels import add_norm_triton
from fourbits.model.ops.conv.kernels import conv_triton
from fourbits.model.ops.gated_norm.kernels import gated_norm_triton
from fourbits.model.ops.mamba_step.kernels import mamba_step_triton
from fourbits.model.ops.mamba_step.weights import StepWeights
from fourbits.model.ops.ssd.kernels import ssd_triton
from fourbits.quant.grouped_layout import GroupedOperand, most_tiles
from fourbits.quant.kernels import launch_dequantize, launch_grouped, launch_stats, launch_unpack
from fourbits.quant.kernels.kernel_config import FP8_FORMATS
from fourbits.quant.kernels.launch_fake import FakeQuantizer
from fourbits.quant.kernels.quantizers import kernel_quantizer
from fourbits.quant.kernels.support import unsupported
from fourbits.quant.operand import OperandSpec
from fourbits.quant.request import OperandInputs, OperandRequest, StatsTarget
from fourbits.quant.scale_codes import SCALE_DTYPES
from fourbits.quant.tensor import ExactOperand, QuantizedTensor
from fourbits.recipe.presets import get_recipe
from support.fused_cases import BLOCK_2D, COLUMN_SR, PAIRS, ROW_SR
from support.kernel_builds import GPU, Start, on_gpu, recording, signature

_KEY = torch.zeros(5, dtype=torch.int64)
_ONE = torch.ones(())
_SHARES = torch.zeros(16, 16, dtype=torch.int8)
#: head dim and state size: of the presets, the largest, and the smallest
_SCANS = ((64, 128), (80, 128), (64, 256), (128, 128), (16, 16))


def names() -> set[str]:
    """Names of the kernels in the package."""
    found: set[str] = set()
    for module in pkgutil.walk_packages(fourbits.__path__, "fourbits."):
        if module.name.endswith("_triton"):
            members = vars(importlib.import_module(module.name))
            found |= {name for name, kernel in members.items() if isinstance(kernel, triton.JITFunction)}
    return {name for name in found if name.endswith("_kernel")}


def launches() -> list[tuple[str, Start]]:
    """(what for, launch) of every kernel, with every configuration that changes its code much."""
    every = (
        *(_quantizing(), _feeding_back(), _recording_stats(), _unpacking(), _multiplying(), _in_models()),
        *([of_experts("nvfp4"), chains()] if gpu_model(GPU).tma else []),
    )
    return [(name, start) for part in every for name, starts in part for start in starts]


def _quantizing() -> Generator[tuple[str, list[Start]]]:
    """All specs with a kernel: exact, packed, both at once, and to values in one pass."""
    for name, pair in PAIRS.items():
        requests = [OperandRequest(spec, 1 - i) for i, spec in enumerate(pair) if spec is not None]
        weight = any(request.spec.source == "bf16" for request in requests)
        x = on_gpu(64, 2048, dtype=torch.float32 if weight else torch.bfloat16)
        packed = [request._replace(packed=True) for request in requests]
        for some in (requests, *([request] for request in packed), [*requests[:1], *packed[1:]]):
            if unsupported(signature(x), some) is None:
                yield f"{name}, {_forms(some)}", _quantized(x, some)
        if not requests[0].spec.rht and requests[0].spec.format not in FP8_FORMATS:
            with recording() as starts:
                FakeQuantizer(signature(x), requests[0])(x, OperandInputs(_KEY))
            yield f"{name}, values", starts


def _feeding_back() -> Generator[tuple[str, list[Start]]]:
    for span, rule in ((128, "max"), (128, "4over6-mse"), (256, "max")):
        spec = OperandSpec(error_feedback=span, scale_rule=rule)
        yield f"error feedback over {span}, {rule}", _quantized(on_gpu(64, 2048), [OperandRequest(spec, 1)])


def _forms(requests: Iterable[OperandRequest]) -> str:
    return " and ".join(f"{'packed' if r.packed else 'exact'} along {r.axis}" for r in requests)


def _quantized(
    x: torch.Tensor, requests: list[OperandRequest], stats: StatsTarget | None = None
) -> list[Start]:
    with recording(launch_stats) as starts:
        inputs = (OperandInputs(_KEY, 0, None if stats is None else _ONE, None, _SHARES),) * len(requests)
        kernel_quantizer(signature(x), tuple(requests))(x, inputs, stats)
    return starts


def _recording_stats() -> Generator[tuple[str, list[Start]]]:
    target = StatsTarget(torch.zeros(2), torch.zeros(2, 4, dtype=torch.int64), (0, 1))
    pair = [OperandRequest(spec, axis, amax="stored") for spec, axis in ((ROW_SR, 1), (COLUMN_SR, 0))]
    yield "amax policies", _quantized(on_gpu(64, 2048), pair, target)


def _unpacking() -> Generator[tuple[str, list[Start]]]:
    """Unpacked, dequantized and transposed, from both layouts of packed operands."""
    codes, scales = on_gpu(64, 1024, dtype=torch.uint8), on_gpu(4, 128, dtype=torch.uint8)
    stored = codes, scales.view(torch.float8_e4m3fn), _ONE
    row = QuantizedTensor(*stored, 1, (64, 2048), BLOCK_2D)
    codes, scales = on_gpu(32, 2048, dtype=torch.uint8), on_gpu(4, 2048, dtype=torch.uint8)
    in_layout = codes.t(), scales.view(torch.float8_e4m3fn).t(), _ONE
    for name, q in (
        ("rows", row),
        ("columns", QuantizedTensor(*stored, 0, (2048, 64), BLOCK_2D)),
        ("columns in the layout of the tensor", QuantizedTensor(*in_layout, 0, (64, 2048), OperandSpec())),
    ):
        with recording() as starts:
            launch_unpack.unpacked(q)
            for dtype in (torch.bfloat16, torch.float32):
                launch_dequantize.dequantized(q, dtype)
        yield f"packed {name}", starts
    with recording() as starts:
        launch_dequantize.transposed(row)
    yield "packed squares", starts


def _multiplying() -> Generator[tuple[str, list[Start]]]:
    """BF16 GEMMs of all layouts that fill tiles, split K, or have odd sizes; FP8 GEMMs."""
    for M, N, K in ((4096, 4096, 4096), (512, 2048, 32768), (33, 40, 50)):
        for axes in ((1, 1), (1, 0), (0, 0), (0, 1)):
            a = on_gpu(*((M, K) if axes[0] else (K, M)))
            b = on_gpu(*((N, K) if axes[1] else (K, N)))
            layouts = [
                OperandLayout((x.shape[0], x.shape[1]), x.stride(0), axis, True)
                for x, axis in zip((a, b), axes, strict=True)
            ]
            with recording() as starts:
                bf16_gemm(*layouts, torch.bfloat16, torch.float32, GPU)(a, b, _ONE, _ONE, torch.ones(N))
            yield f"GEMM {M}x{N}x{K} of axes {axes}", starts
    for dtype, name in ((torch.float8_e4m3fn, "fp8"), (torch.float8_e5m2, "fp8-e5m2")):
        row, square = OperandSpec(format=name), OperandSpec(format=name, block=(128, 128))
        a = ExactOperand(on_gpu(512, 512, dtype=dtype), torch.ones(512, 4), 1, row)
        for b_scale, spec in ((torch.ones(4, 4), square), (torch.ones(512, 4), row)):
            with recording() as starts:
                launch_fp8.matmul(a, ExactOperand(a.values, b_scale, 1, spec), torch.bfloat16, None)
            yield f"GEMM of {name}, blocks of {spec.block_size}", starts


def of_experts(recipe: str) -> Generator[tuple[str, list[Start]]]:
    """64 experts of 256 tokens: the map, three tensors quantized, the GEMMs of both layouts of weights."""
    groups, rows, K, N, height = 64, 64 * 256, 2048, 1024, 64
    table, most = get_recipe(recipe).table, most_tiles(64 * 256, 64, 64)
    with recording() as starts:
        tiles = launch_grouped.TileMap(rows, groups, height, GPU)(on_gpu(groups + 1, dtype=torch.int32))
    yield "map of experts", starts

    def quantized(
        x: torch.Tensor, roles: dict[str, int], count: int, padded: bool
    ) -> tuple[tuple[GroupedOperand, ...], list[Start]]:
        requests = tuple(OperandRequest(table.operand(role), axis) for role, axis in roles.items())
        size = count, height
        plan = launch_grouped.GroupedQuantizer(signature(x), groups, size, requests, padded, 0)
        with recording() as starts:
            return plan(x, tiles, _KEY, (0,) * len(requests)), starts

    x, starts = quantized(on_gpu(rows, K), {"fprop.lhs": 1, "wgrad.rhs": 0}, most, False)
    yield "X of experts", starts
    dy, starts = quantized(on_gpu(rows, N), {"dgrad.lhs": 1, "wgrad.lhs": 0}, most, False)
    yield "dY of experts", starts
    for name, axis, (down, across) in (("W", 1, (N, K)), ("W stored transposed", 0, (K, N))):
        masters = on_gpu(groups * down, across, dtype=torch.float32)
        (w,), starts = quantized(masters, {"fprop.rhs": axis}, groups * down // height, True)
        yield f"{name} of experts", starts
        for what, a, b, sizes in (("fprop", x[0], w, (N, K)), ("dgrad", dy[0], w, (K, N))):
            b = b if what == "fprop" else b._replace(axis=1 - axis)
            bias = on_gpu(groups, N, dtype=torch.float32) if what == "fprop" else None
            gemm = grouped_gemms.GroupedRows(
                a, b, groups, sizes, torch.bfloat16, None if bias is None else bias.dtype, GPU
            )
            with recording() as starts:
                gemm(a, b, tiles, bias)
            yield f"{what} of experts by {name}", starts
    with recording() as starts:
        sums = grouped_gemms.GroupedSums(dy[1], x[1], groups, (N, K), height, GPU)
        sums(dy[1], x[1], (dy[1].scale, x[1].scale), tiles)
        columns = grouped_gemms.GroupedColumns(N, N, groups, GPU)
        columns(on_gpu(rows, N), on_gpu(groups + 1, dtype=torch.int32))
    yield "wgrad and bias of experts", starts


def chains() -> Generator[tuple[str, list[Start]]]:
    """Sums of FP4 tensor cores: steps of 64 and 96, blocks of rows and squares, E8M0 scales."""
    row, square = OperandSpec(), OperandSpec(block=(16, 16))
    mx = OperandSpec(format="mxfp4")
    for name, products, specs in (("64", 64, (row, square)), ("96", 96, (row, row)), ("mx", 64, (mx, mx))):
        a, b = (_packed(spec, 4096, 4096) for spec in specs)
        with recording() as starts:
            launch_chain.matmul(a, b, products, torch.float32, (_ONE, _ONE), None)
        yield f"sums of {name}", starts


def _packed(spec: OperandSpec, rows: int, length: int) -> QuantizedTensor:
    """An FP4 operand on the GPU."""
    size, fmt = spec.block_size, spec.block_format
    assert size is not None
    assert fmt.scale is not None
    scales = on_gpu(rows // size[0], length // size[1], dtype=torch.uint8).view(SCALE_DTYPES[fmt.scale])
    codes = on_gpu(rows, length // 2, dtype=torch.uint8)
    return QuantizedTensor(codes, scales, _ONE, 1, (rows, length), spec)


def _in_models() -> Generator[tuple[str, list[Start]]]:
    """The SSD scan, convolution and gated norm, forward and backward; the observer of layers."""
    dt, a = on_gpu(1, 512, 32, dtype=torch.float32), on_gpu(32, dtype=torch.float32)
    for head_dim, states in _SCANS:
        x, b = on_gpu(1, 512, 32, head_dim), on_gpu(1, 512, 2, states)
        with recording(ssd_triton) as starts:
            for documents in (None, on_gpu(1, 512, dtype=torch.bool)):
                ssd_triton.forward(x, dt, a, b, b, a, documents)
                ssd_triton.backward(x, x, dt, a, b, b, a, documents)
        yield f"scan with heads of {head_dim} x {states}", starts
    x, taps, bias = (
        on_gpu(2, 256, 4096),
        on_gpu(4, 4096, dtype=torch.float32),
        on_gpu(4096, dtype=torch.float32),
    )
    for documents in (None, on_gpu(2, 256, dtype=torch.int32)):
        with recording(conv_triton) as starts:
            conv_triton.forward(x, taps, bias, documents)
            conv_triton.backward(x, x, taps, bias, documents)
        yield "convolution", starts
    for width, groups in ((4096, 4), (10240, 8)):
        y, weight = on_gpu(2, 64, width), on_gpu(width, dtype=torch.float32)
        with recording(gated_norm_triton) as starts:
            gated_norm_triton.forward(y, y, weight, groups, 1e-5)
            gated_norm_triton.backward(y, y, y, weight, groups, 1e-5)
        yield f"gated norm of {width} in {groups} groups", starts
        with recording(add_norm_triton) as starts:
            for branch in (None, y):
                add_norm_triton.add_norm(y, branch, weight, 1e-5, torch.bfloat16)
        yield f"residual and norm of {width}", starts
    yield from _decoding()
    own, counts = on_gpu(4, dtype=torch.float32), on_gpu(4, 4, dtype=torch.int64)
    with recording(observe_triton) as starts:
        observe_triton.observe(own, counts, own, counts, with_counts=True)
    yield "observer", starts


def _decoding() -> Generator[tuple[str, list[Start]]]:
    """One token of the mixers of hybrid-1.2b, hybrid-12b and nemotron-nano-12b-v2."""
    for groups, per_group, head_dim in ((4, 16, 64), (8, 20, 64), (8, 16, 80)):
        yield f"a token of {groups} groups of {per_group} heads", decoding(groups, per_group, head_dim)


def decoding(groups: int, per_group: int, head_dim: int) -> list[Start]:
    """The launches for one token of a mixer with states of 128, of 64 sequences."""
    heads, fp32 = groups * per_group, torch.float32
    channels = heads * head_dim + 2 * groups * 128
    taps, bias, gain = (
        on_gpu(*sizes, dtype=fp32) for sizes in ((channels, 1, 4), (channels,), (heads * head_dim,))
    )
    dt_bias, a_log, d = (on_gpu(heads, dtype=fp32) for _ in range(3))
    weights = StepWeights(taps, bias, dt_bias, a_log, d, gain, groups, 1e-5)
    projected, inputs = on_gpu(64, sum(weights.widths)), on_gpu(64, 3, channels)
    state, begins = on_gpu(64, heads, head_dim, 128, dtype=fp32), on_gpu(64, dtype=torch.bool)
    with recording(mamba_step_triton, gated_norm_triton) as starts:
        mamba_step_triton.mamba_step(projected, inputs, state, begins, weights)
    return starts
