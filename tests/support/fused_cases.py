"""Cases in which the fused kernels must give the reference's bytes, for the interpreter and for a GPU.

Run as a program it checks cases in Triton's interpreter:
TRITON_INTERPRET=1 python -m support.fused_cases NAME...
"""

import os
import sys
import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fourbits.quant.amax_stats import largest_magnitude, own_amax
from fourbits.quant.kernels import launch_dequantize, launch_unpack, quantizers, support
from fourbits.quant.kernels.launch_fake import FakeQuantizer, unsupported_fake
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import _amax_plan
from fourbits.quant.reference import quantize as reference
from fourbits.quant.request import OperandInputs, OperandRequest, StatsTarget, signature_of
from fourbits.quant.tensor import ExactOperand, QuantizedTensor, dequantized, transposed, unpacked
from support.triton_interpreter import prepare

ROW = OperandSpec()
ROW_SR = OperandSpec(rounding="sr")
COLUMN = OperandSpec(rht=16)
COLUMN_SR = OperandSpec(rounding="sr", rht=16)
BLOCK_2D = OperandSpec(block=(16, 16), source="bf16")
EDEN = OperandSpec(rounding="ms-eden", rht=128, rht_signs="per-call")
MX4 = OperandSpec(format="mxfp4")
MX8 = OperandSpec(format="mxfp8")
FP8_BLOCK_2D = OperandSpec(format="fp8", block=(128, 128), source="bf16")

UE5M3 = "nvfp4-ue5m3-global"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: (row operand, column operand); either may be missing
PAIRS: dict[str, tuple[OperandSpec | None, OperandSpec | None]] = {
    "nearest": (ROW, COLUMN),
    "stochastic": (ROW_SR, COLUMN_SR),
    "weight": (BLOCK_2D, None),
    "plain columns": (None, ROW_SR),
    "square columns": (None, BLOCK_2D),
    "signs drawn once": (None, replace(COLUMN, rht_signs="per-layer")),
    "signs drawn per call": (None, replace(COLUMN_SR, rht_signs="per-call")),
    "no signs": (None, replace(COLUMN, rht_signs="none")),
    "zero codes under zero scales": (replace(ROW, te_compat=False), replace(COLUMN, te_compat=False)),
    "24-bit noise": (replace(ROW, rounding="sr32"), replace(COLUMN, rounding="sr32")),
    "headroom": (replace(ROW_SR, sr_headroom=True), replace(COLUMN, scale_bound=256)),
    "4/6 by square": (replace(ROW, scale_rule="4over6-mse"), replace(COLUMN_SR, scale_rule="4over6-mae")),
    "4/6 weight": (replace(BLOCK_2D, scale_rule="4over6-mse"), replace(BLOCK_2D, scale_rule="4over6-max")),
    "4/6 headroom": (replace(ROW_SR, scale_rule="4over6-max", sr_headroom=True), None),
    "search by square": (replace(ROW, scale_rule="search-mse"), replace(COLUMN_SR, scale_rule="search-mae")),
    "search weight": (replace(BLOCK_2D, scale_rule="search-mse"), None),
    "search headroom": (None, replace(ROW_SR, scale_rule="search-max", sr_headroom=True)),
    "search square columns": (None, replace(BLOCK_2D, scale_rule="search-mae")),
    "search on another grid": (ROW, replace(ROW, scale_rule="search-mae", format="nve1m2")),
    "MS-EDEN": (None, replace(EDEN, rht=32, te_compat=False)),
    "MS-EDEN, rotations of 128": (None, replace(EDEN, source="forward")),
    "MS-EDEN of rows": (EDEN, None),
    "MS-EDEN, rotations of 16": (replace(EDEN, rht=16), None),
    "rotated rows": (replace(ROW_SR, rht=64, rht_signs="per-call"), None),
    "other grids": (replace(ROW_SR, format="nve1m2"), replace(COLUMN, format="nvfp4-ue5m3")),
    "scales beyond the bound": (replace(BLOCK_2D, format=UE5M3), replace(ROW_SR, format=UE5M3)),
    "mxfp4": (MX4, replace(MX4, rounding="sr", rht=32)),
    "mxfp4 weight": (replace(MX4, block=(32, 32), source="bf16"), None),
    "mxfp8": (MX8, replace(MX8, scale_rule="ceil")),
    "fp8": (OperandSpec(format="fp8"), OperandSpec(format="fp8")),
    "fp8 weight": (FP8_BLOCK_2D, FP8_BLOCK_2D),
    "fp8-e5m2": (OperandSpec(format="fp8-e5m2"), None),
    "mxfp8 stochastic": (replace(MX8, rounding="sr"), replace(MX8, format="mxfp8-e5m2", rounding="sr")),
}


@dataclass(frozen=True)
class Case:
    """A tensor and the operands computed from it. `given`: an amax to use instead of the tensor's own."""

    pair: str
    shape: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16
    values: str = "wide"
    given: float | None = None
    #: memory layout of the tensor: plain, rows apart, transposed
    layout: str = "plain"
    #: whether to compare dequantized operands too; codes and scales show nearly every error
    exact: bool = True

    @property
    def name(self) -> str:
        given = "" if self.given is None else f", amax {self.given:g}"
        dtype = str(self.dtype).removeprefix("torch.")
        layout = "" if self.layout == "plain" else f", {self.layout}"
        return f"{self.pair}, {self.shape[0]}x{self.shape[1]} {dtype}, {self.values}{given}{layout}"


def tensor(case: Case, device: torch.device | str) -> Tensor:
    """The case's values: of widely spread magnitudes, with special values among them."""
    generator = torch.Generator().manual_seed(len(case.name))
    x = torch.randn(case.shape, generator=generator)
    x = x * torch.exp2(torch.randint(-30, 31, case.shape, generator=generator).float() / 3)
    if case.values == "tiny":
        x = x * 2.0**-130
    elif case.values == "huge":
        x = (x.sign() * 3.0e38) * torch.rand(case.shape, generator=generator).round()
    elif case.values == "zeros":
        x = torch.where(torch.rand(case.shape, generator=generator) < 0.5, -0.0, 0.0)
    elif case.values == "zero blocks":
        x[:, 16:32] = -0.0
        x[16:32] = 0.0
    elif case.values == "nan and inf":
        x[1, 3], x[-1, 9], x[5, 20], x[-1, -1] = torch.nan, -torch.nan, -torch.inf, torch.inf
    elif case.values == "ties":
        x = torch.randint(-24, 25, case.shape, generator=generator) * 0.25
    if case.layout == "rows apart":
        x = torch.nn.functional.pad(x, (0, 24), value=torch.nan)
    x = x.to(case.dtype).to(device)[:, : case.shape[1]]
    return x.t().contiguous().t() if case.layout == "transposed" else x


def by_kernels(
    x: Tensor,
    requests: list[OperandRequest],
    inputs: OperandInputs | list[OperandInputs],
    stats: StatsTarget | None = None,
) -> tuple[ExactOperand | QuantizedTensor, ...]:
    """The operands in one pass of the fused kernels, which must support the request."""
    signature, requested = signature_of(x), tuple(requests)
    reason = support.unsupported(signature, requested)
    assert reason is None, reason
    each = tuple(inputs) if isinstance(inputs, list) else (inputs,) * len(requests)
    return quantizers.kernel_quantizer(signature, requested)(x, each, stats)


def differences(case: Case, device: torch.device | str = "cpu") -> list[str]:
    """What differs from the reference, field by field; empty if every byte is the same."""
    x = tensor(case, device)
    key = torch.tensor([1234, 5 * 8 + 4, 17, 48, 3], device=device)
    amax = None if case.given is None else torch.tensor(case.given, device=device)
    row, column = PAIRS[case.pair]
    requests = [
        OperandRequest(spec, axis, amax="given" if amax is not None and spec.tensor_scaled else "own")
        for spec, axis in ((row, 1), (column, 0))
        if spec is not None
    ]
    found: list[str] = []
    if case.exact:
        inputs = [OperandInputs(key, 0, amax if r.amax == "given" else None) for r in requests]
        for result, request in zip(by_kernels(x, requests, inputs), requests, strict=True):
            assert isinstance(result, ExactOperand)
            found += _exact_differences(x, result, request, amax, key)
        found += _scaled_differences(x, requests, inputs, amax, key)
    for request in requests:
        given = amax if request.amax == "given" else None
        (result,) = by_kernels(x, [request._replace(packed=True)], OperandInputs(key, 0, given))
        assert isinstance(result, QuantizedTensor)
        true = _quantized(x, request, given, key)
        found += _packed_differences(f"axis {request.axis}", result, true)
        found += _fake_differences(x, request, OperandInputs(key, 0, given), true)
    kept = [request._replace(packed=request.axis == 0) for request in requests]
    if len(kept) == 2 and support.unsupported(signature_of(x), kept) is None:
        found += _kept_packed_differences(x, kept, amax, key)
    return found


def _exact_differences(
    x: Tensor, result: ExactOperand, request: OperandRequest, amax: Tensor | None, key: Tensor, name: str = ""
) -> list[str]:
    """An exact operand of the kernels against the reference's."""
    given = amax if request.amax == "given" else None
    true = _exact_operand(x, request, given, key)
    name = name or f"axis {request.axis}"
    shapes = _unequal(f"{name} padded", result.values[:0], true.values.to(result.values.dtype)[:0])
    values, true_values = (op.values[: x.shape[0], : x.shape[1]].to(torch.bfloat16) for op in (result, true))
    found = shapes or _unequal(f"{name} values", values, true_values)
    return found + _unequal(f"{name} scale", result.scale, true.scale)


def _scaled_differences(
    x: Tensor,
    requests: list[OperandRequest],
    inputs: list[OperandInputs],
    amax: Tensor | None,
    key: Tensor,
) -> list[str]:
    """Operands of the tensor times a factor, against the reference's of the scaled tensor."""
    signature, factor = signature_of(x)._replace(scaled=True), torch.tensor(0.3, device=x.device)
    found: list[str] = []
    for request, given in zip(requests, inputs, strict=True):
        if support.unsupported(signature, (request,)) is None:
            plan = quantizers.kernel_quantizer(signature, (request,))
            (result,) = plan(x, (given._replace(factor=factor),), None)
            assert isinstance(result, ExactOperand)
            found += _exact_differences(x.float() * factor, result, request, amax, key, "scaled")
    return found


def _packed_differences(name: str, result: QuantizedTensor, true: QuantizedTensor) -> list[str]:
    """A packed operand of the kernels, and the values they unpack from it, against the reference's."""
    found: list[str] = []
    for field in ("codes", "block_scale", "global_scale"):
        found += _unequal(f"{name} {field}", getattr(result, field), getattr(true, field))
    if launch_unpack.unsupported_unpack(result) is None:
        again = launch_unpack.unpacked(result)
        values = again.values.t() if again.axis == 0 else again.values
        found += _unequal(f"{name} unpacked", values, unpacked(true).values)
    for dtype in DTYPES:
        if launch_dequantize.unsupported_dequantize(result, dtype) is None:
            values = launch_dequantize.dequantized(result, dtype)
            found += _unequal(f"{name} dequantized", values, dequantized(true, dtype))
    if launch_dequantize.unsupported_transpose(result) is None:
        moved, true_moved = launch_dequantize.transposed(result), transposed(true)
        assert (moved.shape, moved.axis) == (true_moved.shape, true_moved.axis)
        for field in ("codes", "block_scale", "global_scale"):
            found += _unequal(f"{name} transposed {field}", getattr(moved, field), getattr(true_moved, field))
    return found


def _fake_differences(
    x: Tensor, request: OperandRequest, inputs: OperandInputs, true: QuantizedTensor
) -> list[str]:
    """A single pass that quantizes and dequantizes, against the dequantized codes of the reference."""
    if unsupported_fake(signature_of(x), request) is not None:
        return []
    result = FakeQuantizer(signature_of(x), request)(x, inputs)
    return _unequal(f"axis {request.axis} fake", result, dequantized(true, x.dtype))


def _kept_packed_differences(
    x: Tensor, requests: list[OperandRequest], amax: Tensor | None, key: Tensor
) -> list[str]:
    """A single pass that keeps the column operand packed, against the reference."""
    inputs = [OperandInputs(key, 0, amax if r.amax == "given" else None) for r in requests]
    row, column = by_kernels(x, requests, inputs)
    assert isinstance(row, ExactOperand)
    assert isinstance(column, QuantizedTensor)
    stored = _quantized(x, requests[1], inputs[1].amax, key)
    found = _exact_differences(x, row, requests[0], amax, key, "kept row")
    return found + _packed_differences("kept column", column, stored)


def amax_differences(
    pair: tuple[OperandSpec | None, OperandSpec | None], values: str, device: torch.device | str = "cpu"
) -> list[str]:
    """The amaxes of operands before they are quantized, in both orders, against the reference's."""
    x = tensor(Case("nearest", (40, 48), values=values, layout="rows apart"), device)
    counter = torch.tensor([1234, 0, 17, 48, 3], device=device)
    key = torch.tensor([1234, 5 * 8 + 4, 17, 48, 3])
    requests = [OperandRequest(spec, 1 - i) for i, spec in enumerate(pair) if spec is not None]
    found: list[str] = []
    for some in (tuple(requests), tuple(reversed(requests))):
        plan = _amax_plan(signature_of(x), some)
        assert plan is not None
        amaxes = plan(x, (OperandInputs(counter, 5 * 8 + 4),) * len(some))
        true = [largest_magnitude(x.cpu(), r.spec, r.axis, key if r.draws else None) for r in some]
        found += _unequal(f"amaxes of axes {[r.axis for r in some]}", amaxes, torch.stack(true))
    return found


def policy_differences(
    stored: tuple[float, float], device: torch.device | str = "cpu", name: str = "nvfp4"
) -> list[str]:
    """The same for both operands of a format under amax policies that have stored these amaxes (negative:
    none yet).
    """
    x = tensor(Case("nearest", (40, 48)), device)
    key = torch.tensor([1234, 5 * 8 + 4, 17, 48, 3], device=device)
    counter = torch.tensor([1234, 17, 0, 48, 3], device=device)
    fields = (0, 2, 1, 3, 4)  # the same key as linear layers keep it
    given = torch.tensor(stored, device=device)
    row, column = replace(ROW_SR, format=name), replace(COLUMN_SR, format=name, rht_signs="per-call")
    requests = [OperandRequest(spec, axis, False, "stored", fields) for spec, axis in ((row, 1), (column, 0))]
    inputs = [OperandInputs(counter, 5 * 8 + 4, amax) for amax in given]
    own, counts = (
        torch.full((3,), -1.0, device=device),
        torch.zeros((3, 4), dtype=torch.int64, device=device),
    )
    operands = by_kernels(x, requests, inputs, StatsTarget(own, counts, (2, 0)))
    found = []
    for result, place, request in zip(operands, (2, 0), requests, strict=True):
        assert isinstance(result, ExactOperand)
        spec, axis = request.spec, request.axis
        true = own_amax(x.cpu(), spec, axis, given[1 - axis].cpu(), key.cpu())
        operand = _exact_operand(x, request, true.used, key)
        found += _unequal(f"axis {axis} values", result.values, operand.values)
        found += _unequal(f"axis {axis} scale", result.scale, operand.scale)
        found += _unequal(f"axis {axis} own amax", own[place], true.own)
        equal = counts[place, :2].tolist() == true.counts.tolist()
        found += [] if equal else [f"axis {axis} counts {counts[place]}"]
    return found


def _unequal(what: str, result: Tensor, true: Tensor) -> list[str]:
    """Bytes compared; a NaN is a NaN whatever its sign and payload, which arithmetic does not promise."""
    result = result.cpu()
    if result.shape != true.shape or result.dtype != true.dtype:
        return [f"{what}: {result.dtype} {list(result.shape)} for {true.dtype} {list(true.shape)}"]
    if result.dtype in DTYPES:
        nan = torch.isnan(true)
        if not torch.equal(torch.isnan(result), nan):
            return [f"{what}: NaN elsewhere"]
        result, true = torch.where(nan, 0.0, result), torch.where(nan, 0.0, true)
    patterns = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[result.element_size()]
    count = int((result.contiguous().view(patterns) != true.contiguous().view(patterns)).sum())
    return [f"{what}: {count} of {result.numel()} differ"] if count else []


def _quantized(x: Tensor, request: OperandRequest, amax: Tensor | None, key: Tensor) -> QuantizedTensor:
    """The reference's packed operand; `fourbits.quantize` would run kernels in the interpreter too."""
    amax = None if amax is None else amax.abs().cpu()
    return reference.quantize(x.cpu(), request.spec, request.axis, amax, key.cpu())


def _exact_operand(x: Tensor, request: OperandRequest, amax: Tensor | None, key: Tensor) -> ExactOperand:
    """The reference's exact operand."""
    amax = None if amax is None else amax.abs().cpu()
    return reference.exact_operand(x.cpu(), request.spec, request.axis, amax, key.cpu())


EDGES = [
    *(Case("nearest", shape) for shape in ((1, 16), (1, 1))),
    Case("stochastic", (16, 32), torch.float16),
    Case("weight", (17, 32), torch.float32),
    *(Case("stochastic", (16, 32), dtype, "tiny") for dtype in (torch.float32, torch.bfloat16)),
    *(Case(pair, (16, 32), torch.float32, "huge") for pair in ("nearest", "weight")),
    *(Case(pair, (16, 32), values="zeros") for pair in ("stochastic", "mxfp4")),
    *(Case(pair, (33, 48), values="zero blocks") for pair in ("stochastic", "zero codes under zero scales")),
    *(Case(pair, (18, 50), values="nan and inf") for pair in ("weight", "mxfp4")),
    *(Case("stochastic", (18, 50), values="nan and inf", given=given) for given in (3.0, float("nan"))),
    *(Case("stochastic", (16, 16), given=given) for given in (0.0, 1e-3, 1e6, -2.0)),
    *(Case("search weight", (18, 40), torch.float32, values) for values in ("tiny", "huge", "zero blocks")),
    *(Case("search headroom", (18, 40), values=values) for values in ("nan and inf", "ties")),
    *(Case("search weight", (17, 33), given=given) for given in (0.0, 1e-45, 3.4e38)),
    Case("search on another grid", (17, 33), torch.float16),
    *(Case(pair, (16, 32), values="ties") for pair in ("nearest", "stochastic", "mxfp8")),
]
#: small enough for the interpreter, which spends its time on operations rather than on elements
SMALL = [
    *(Case(pair, (16, 48)) for pair in PAIRS),
    Case("nearest", (32, 144)),
    Case("MS-EDEN, rotations of 128", (150, 40), torch.float32),
    *(Case("MS-EDEN", (66, 50), values=values) for values in ("nan and inf", "zero blocks", "tiny")),
    Case("MS-EDEN of rows", (18, 150), given=1e6),
    Case("MS-EDEN of rows", (70, 130), torch.float16, "nan and inf", layout="rows apart"),
    Case("MS-EDEN, rotations of 128", (20, 150), layout="transposed"),
    *(Case("MS-EDEN of rows", shape) for shape in ((0, 32), (32, 0))),
    *(Case(pair, (18, 50)) for pair in ("stochastic", "weight")),
    *(Case(pair, (18, 50), values="nan and inf") for pair in ("nearest", "mxfp8")),
    *(Case("fp8", shape, torch.float32, "nan and inf") for shape in ((150, 40), (18, 300))),
    Case("fp8 weight", (130, 140), torch.float32),
    *(Case("nearest", shape, given=given) for shape in ((0, 32), (32, 0)) for given in (None, 2.0)),
    *(Case(pair, (18, 50), layout="rows apart") for pair in ("stochastic", "fp8")),
    Case("nearest", (18, 50), layout="transposed"),
    *(replace(case, exact=False) for case in EDGES),
]


#: pairs and values whose amaxes are found before they are quantized
AMAXES = [
    *((name, "wide") for name in ("nearest", "stochastic", "weight", "signs drawn per call", "headroom")),
    *(("stochastic", values) for values in ("zeros", "nan and inf", "tiny")),
]

#: amaxes stored for the row and the column operand, and their format
POLICIES = [
    *((stored, "nvfp4") for stored in ((-1.0, -1.0), (7.5, 2.5), (300.0, -1.0))),
    ((0.5, 7.5), UE5M3),  # 137 times too small: some blocks saturate
]


def main(names: list[str]) -> int:
    """Check cases by name (all without names); print what differs."""
    prepare()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what is allocated and not yet written with NaN or 255
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns of 1 / 0, which has a defined result here
    failed = 0
    for case in SMALL:
        if not names or case.name in names:
            found = differences(case)
            failed += bool(found)
            print(case.name, *found, sep="\n  ")
    for name, values in () if names else AMAXES:
        found = amax_differences(PAIRS[name], values)
        failed += bool(found)
        print(f"amaxes of {name}, {values}", *found, sep="\n  ")
    for stored, fmt in () if names else POLICIES:
        found = policy_differences(stored, name=fmt)
        failed += bool(found)
        print(f"stored amaxes {stored}, {fmt}", *found, sep="\n  ")
    return failed


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    sys.exit(main(sys.argv[1:]))
