"""Cases in which the fused kernels must give the reference's bytes, for the interpreter and for a card.

Run as a program it checks cases in Triton's interpreter: TRITON_INTERPRET=1 python -m support.fused_cases NAME...
"""

import os
import sys
import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fourbits.formats.packing import swizzle_scales
from fourbits.quant.amax_stats import own_amax
from fourbits.quant.kernels.kernel_config import NoiseKey
from fourbits.quant.kernels.launch_exact import fused_observed, fused_operands
from fourbits.quant.kernels.launch_packed import (
    fused_kept_packed,
    fused_quantize,
    fused_swizzled,
    fused_unpacked,
    why_not_kept_packed,
    why_not_unpacked,
)
from fourbits.quant.kernels.support import Wanted
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import exact_operand, quantize
from fourbits.quant.tensor import unpacked
from support.triton_interpreter import prepare

ROW = OperandSpec()
ROW_SR = OperandSpec(rounding="sr")
COLUMN = OperandSpec(rht=16)
COLUMN_SR = OperandSpec(rounding="sr", rht=16)
TILE = OperandSpec(block=(16, 16), source="bf16")
EDEN = OperandSpec(rounding="ms-eden", rht=128, rht_signs="per-call")
MX4 = OperandSpec(format="mxfp4")
MX8 = OperandSpec(format="mxfp8")
FP8_TILE = OperandSpec(format="fp8", block=(128, 128), source="bf16")

#: (row operand, column operand); either may be missing
PAIRS: dict[str, tuple[OperandSpec | None, OperandSpec | None]] = {
    "nearest": (ROW, COLUMN),
    "stochastic": (ROW_SR, COLUMN_SR),
    "weight": (TILE, None),
    "plain columns": (None, ROW_SR),
    "square columns": (None, TILE),
    "signs drawn once": (None, replace(COLUMN, rht_signs="per-layer")),
    "signs drawn per call": (None, replace(COLUMN_SR, rht_signs="per-call")),
    "no signs": (None, replace(COLUMN, rht_signs="none")),
    "zero codes under zero scales": (replace(ROW, te_compat=False), replace(COLUMN, te_compat=False)),
    "24-bit noise": (replace(ROW, rounding="sr32"), replace(COLUMN, rounding="sr32")),
    "headroom": (replace(ROW_SR, sr_headroom=True), replace(COLUMN, scale_bound=256)),
    "4/6 by square": (replace(ROW, scale_rule="4over6-mse"), replace(COLUMN_SR, scale_rule="4over6-mae")),
    "4/6 weight": (replace(TILE, scale_rule="4over6-mse"), replace(TILE, scale_rule="4over6-max")),
    "4/6 headroom": (replace(ROW_SR, scale_rule="4over6-max", sr_headroom=True), None),
    "MS-EDEN": (None, replace(EDEN, rht=32, te_compat=False)),
    "MS-EDEN, rotations of 128": (None, replace(EDEN, source="forward")),
    "MS-EDEN of rows": (EDEN, None),
    "rotated rows": (replace(ROW_SR, rht=64, rht_signs="per-call"), None),
    "other grids": (replace(ROW_SR, format="nve1m2"), replace(COLUMN, format="nvfp4-ue5m3")),
    "mxfp4": (MX4, replace(MX4, rounding="sr", rht=32)),
    "mxfp4 weight": (replace(MX4, block=(32, 32), source="bf16"), None),
    "mxfp8": (MX8, replace(MX8, scale_rule="ceil")),
    "fp8": (OperandSpec(format="fp8"), OperandSpec(format="fp8")),
    "fp8 weight": (FP8_TILE, FP8_TILE),
    "fp8-e5m2": (OperandSpec(format="fp8-e5m2"), None),
    "mxfp8 stochastic": (replace(MX8, rounding="sr"), replace(MX8, format="mxfp8-e5m2", rounding="sr")),
}


@dataclass(frozen=True)
class Case:
    """A tensor and the operands to make of it. `given`: an amax to use, instead of the tensor's own."""

    pair: str
    shape: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16
    values: str = "wide"
    given: float | None = None
    #: how the tensor lies in memory: plain, rows apart, turned
    layout: str = "plain"
    #: whether to compare exact operands too; codes and scales say nearly everything
    exact: bool = True

    @property
    def name(self) -> str:
        given = "" if self.given is None else f", amax {self.given:g}"
        dtype = str(self.dtype).removeprefix("torch.")
        layout = "" if self.layout == "plain" else f", {self.layout}"
        return f"{self.pair}, {self.shape[0]}x{self.shape[1]} {dtype}, {self.values}{given}{layout}"


def tensor(case: Case, device: torch.device | str) -> Tensor:
    """The case's values: of widely spread magnitudes, with something in their midst."""
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
    return x.t().contiguous().t() if case.layout == "turned" else x


def differences(case: Case, device: torch.device | str = "cpu") -> list[str]:
    """What differs from the reference, field by field; empty if every byte is the same."""
    x = tensor(case, device)
    key = torch.tensor([1234, 5 * 8 + 4, 17, 48, 3], device=device)
    amax = None if case.given is None else torch.tensor(case.given, device=device)
    row, column = PAIRS[case.pair]
    wanted = [
        Wanted(spec, axis, key, amax if spec.tensor_scaled else None)
        for spec, axis in ((row, 1), (column, 0))
        if spec is not None
    ]
    found = []
    for made, want in zip(fused_operands(x, wanted) if case.exact else (), wanted, strict=case.exact):
        true = exact_operand(x.cpu(), want.spec, want.axis, _cpu(want.amax), key.cpu())
        shapes = _unequal(f"axis {want.axis} padded", made.values[:0], true.values.to(made.values.dtype)[:0])
        values, true_values = (
            op.values[: x.shape[0], : x.shape[1]].to(torch.bfloat16) for op in (made, true)
        )
        found += shapes or _unequal(f"axis {want.axis} values", values, true_values)
        found += _unequal(f"axis {want.axis} scale", made.scale, true.scale)
    for made, want in zip(fused_quantize(x, wanted), wanted, strict=True):
        true = quantize(x.cpu(), want.spec, want.axis, _cpu(want.amax), key.cpu())
        for field in ("codes", "block_scale", "global_scale"):
            found += _unequal(f"axis {want.axis} {field}", getattr(made, field), getattr(true, field))
        if why_not_unpacked(made) is None:
            again = fused_unpacked(made).values
            found += _unequal(f"axis {want.axis} unpacked", again, unpacked(true).values)
    if len(wanted) == 2 and why_not_kept_packed(x, *wanted) is None:
        found += _kept_packed_differences(x, wanted[0], wanted[1])
    return found


def _kept_packed_differences(x: Tensor, row: Wanted, column: Wanted) -> list[str]:
    """What one read that keeps the column operand packed gives, against the reference."""
    made, packed = fused_kept_packed(x, row, column)
    cpu = x.cpu(), [_cpu(want.key) for want in (row, column)]  # pyright: ignore[reportArgumentType]
    true = exact_operand(cpu[0], row.spec, 1, _cpu(row.amax), cpu[1][0])
    stored = quantize(cpu[0], column.spec, 0, _cpu(column.amax), cpu[1][1])
    inside = made.values[: x.shape[0], : x.shape[1]], true.values[: x.shape[0], : x.shape[1]]
    found = _unequal("kept: row values", *inside) + _unequal("kept: row scale", made.scale, true.scale)
    for field in ("codes", "block_scale", "global_scale"):
        found += _unequal(f"kept: {field}", getattr(packed, field), getattr(stored, field))
    again = fused_unpacked(packed)
    values = again.values.t() if again.axis == 0 else again.values
    return found + _unequal("kept: unpacked", values, unpacked(stored).values)


def policy_differences(stored: tuple[float, float], device: torch.device | str = "cpu") -> list[str]:
    """The same for both operands under amax policies that have stored these amaxes (negative: none yet)."""
    x = tensor(Case("nearest", (40, 48)), device)
    key = torch.tensor([1234, 5 * 8 + 4, 17, 48, 3], device=device)
    clock = torch.tensor([1234, 17, 0, 48, 3], device=device)
    kept = NoiseKey(clock, fields=(0, 2, 1, 3, 4), stream=5 * 8 + 4)  # the same key as linears keep it
    given = torch.tensor(stored, device=device)
    column = replace(COLUMN_SR, rht_signs="per-call")
    wanted = [Wanted(ROW_SR, 1, kept, stored=given[0]), Wanted(column, 0, kept, stored=given[1])]
    found = []
    own, counts = (
        torch.full((3,), -1.0, device=device),
        torch.zeros((3, 4), dtype=torch.int64, device=device),
    )
    operands = fused_observed(x, wanted, (own, counts), (2, 0))
    for made, place, want in zip(operands, (2, 0), wanted, strict=True):
        note = own[place], counts[place, :2]
        true = own_amax(x.cpu(), want.spec, want.axis, given[1 - want.axis].cpu(), key.cpu())
        operand = exact_operand(x.cpu(), want.spec, want.axis, true.used, key.cpu())
        found += _unequal(f"axis {want.axis} values", made.values, operand.values)
        found += _unequal(f"axis {want.axis} scale", made.scale, operand.scale)
        found += _unequal(f"axis {want.axis} own amax", note[0], true.own)
        found += [] if note[1].tolist() == true.counts.tolist() else [f"axis {want.axis} counts {note[1]}"]
    return found


def swizzled_differences(spec: OperandSpec, axis: int, device: torch.device | str = "cpu") -> list[str]:
    """The same for scales in the layout of block-scaled tensor cores, whose padding is zero."""
    x = tensor(Case("nearest", (146, 90)), device)
    codes, scales, global_scale = fused_swizzled(x, Wanted(spec, axis))
    true = quantize(x.cpu(), spec, axis)
    found = _unequal("swizzled scales", scales, swizzle_scales(true.block_scale.view(torch.uint8)))
    found += _unequal("swizzled codes", codes, true.codes)
    return found + _unequal("swizzled global scale", global_scale, true.global_scale)


def _unequal(what: str, made: Tensor, true: Tensor) -> list[str]:
    """Bytes compared; a NaN is a NaN whatever its sign and payload, which arithmetic does not promise."""
    made = made.cpu()
    if made.shape != true.shape or made.dtype != true.dtype:
        return [f"{what}: {made.dtype} {list(made.shape)} for {true.dtype} {list(true.shape)}"]
    if made.dtype in (torch.float32, torch.bfloat16):
        nan = torch.isnan(true)
        if not torch.equal(torch.isnan(made), nan):
            return [f"{what}: NaN elsewhere"]
        made, true = torch.where(nan, 0.0, made), torch.where(nan, 0.0, true)
    patterns = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[made.element_size()]
    count = int((made.contiguous().view(patterns) != true.contiguous().view(patterns)).sum())
    return [f"{what}: {count} of {made.numel()} differ"] if count else []


def _cpu(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.cpu()


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
    *(Case(pair, (16, 32), values="ties") for pair in ("nearest", "stochastic", "mxfp8")),
]
#: small enough for the interpreter, which spends its time on operations rather than on elements
SMALL = [
    *(Case(pair, (16, 48)) for pair in PAIRS),
    Case("nearest", (32, 144)),
    Case("MS-EDEN, rotations of 128", (150, 40), torch.float32),
    *(Case("MS-EDEN", (66, 50), values=values) for values in ("nan and inf", "zero blocks", "tiny")),
    Case("MS-EDEN of rows", (18, 150), given=1e6),
    *(Case(pair, (18, 50)) for pair in ("stochastic", "weight")),
    *(Case(pair, (18, 50), values="nan and inf") for pair in ("nearest", "mxfp8")),
    *(Case("fp8", shape, torch.float32, "nan and inf") for shape in ((150, 40), (18, 300))),
    Case("fp8 weight", (130, 140), torch.float32),
    *(Case("nearest", shape, given=given) for shape in ((0, 32), (32, 0)) for given in (None, 2.0)),
    *(Case(pair, (18, 50), layout="rows apart") for pair in ("stochastic", "fp8")),
    Case("nearest", (18, 50), layout="turned"),
    *(replace(case, exact=False) for case in EDGES),
]


#: amaxes stored for the row and the column operand
POLICIES = [(-1.0, -1.0), (7.5, 2.5), (300.0, -1.0)]


#: operands that are written for block-scaled tensor cores
SWIZZLED = [(ROW, 1), (COLUMN, 0), (TILE, 1)]


def main(names: list[str]) -> int:
    """Check cases by name (all without names); print what differs."""
    prepare()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what is allocated and not yet written with NaN or 255
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's word on 1 / 0, which has a defined result here
    failed = 0
    for case in SMALL:
        if not names or case.name in names:
            found = differences(case)
            failed += bool(found)
            print(case.name, *found, sep="\n  ")
    for stored in () if names else POLICIES:
        found = policy_differences(stored)
        failed += bool(found)
        print(f"stored amaxes {stored}", *found, sep="\n  ")
    for spec, axis in () if names else SWIZZLED:
        found = swizzled_differences(spec, axis)
        failed += bool(found)
        print(f"swizzled, {spec.block}, axis {axis}", *found, sep="\n  ")
    return failed


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    sys.exit(main(sys.argv[1:]))
