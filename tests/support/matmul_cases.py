"""GEMMs of the kernels against the exact sum, for the interpreter and for a GPU.

Run as a program it checks cases in Triton's interpreter: TRITON_INTERPRET=1 python -m support.matmul_cases
"""

import os
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fourbits.gemm.kernels import gemms
from fourbits.gemm.kernels.fp8_triton import decoded
from fourbits.gemm.kernels.launch_bf16 import TmaGemm
from fourbits.gemm.native.self_check import share_of_bound
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference import quantize as reference
from fourbits.quant.tensor import ExactOperand
from support.triton_interpreter import prepare

ROW = OperandSpec()
COLUMN = OperandSpec(rht=16)
BLOCK_2D = OperandSpec(block=(16, 16), source="bf16")
FP8 = OperandSpec(format="fp8")
FP8_BLOCK_2D = OperandSpec(format="fp8", block=(128, 128), source="bf16")

#: docs/nvfp4.md, section 12.5: four instructions per segment of 33 terms, truncated 13 bits below the largest
FP8_SUM_ERROR = 4 * 33 * 2.0**-13
#: (a, its axis, b, its axis): the three GEMMs of the recipes, and other combinations that callers may pass
LAYOUTS: dict[str, tuple[OperandSpec, int, OperandSpec, int]] = {
    "fprop": (ROW, 1, BLOCK_2D, 1),
    "dgrad": (ROW, 1, BLOCK_2D, 0),
    "wgrad": (COLUMN, 0, COLUMN, 0),
    "both transposed but one": (ROW, 0, ROW, 1),
    "fp8 fprop": (FP8, 1, FP8_BLOCK_2D, 1),
    "fp8 dgrad": (FP8, 1, FP8_BLOCK_2D, 0),
    "fp8 wgrad": (FP8, 0, FP8, 0),
    "fp8 squares on the left": (FP8_BLOCK_2D, 1, FP8, 1),
}


@dataclass(frozen=True)
class GemmCase:
    """A GEMM of shape (M, N, K), and what its epilogue does."""

    layout: str
    shape: tuple[int, int, int]
    out_dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    #: whether the bias' entries lie apart in memory, and all in one place
    apart: bool = False
    one_entry: bool = False
    #: whether the left operand's values are stored transposed, as kernels leave transformed rows
    transposed: bool = False
    #: whether the product of both global scales overflows in FP32, though none of values does
    large: bool = False
    #: whether one global scale takes the sum out of FP32, and the other one back
    far_apart: bool = False

    @property
    def name(self) -> str:
        extra = " + bias" if self.bias else ""
        extra += (", transposed" if self.transposed else "") + (", large" if self.large else "")
        extra += ", far apart" if self.far_apart else ""
        extra += (" apart" if self.apart else "") + (" of one entry" if self.one_entry else "")
        return f"{self.layout} {'x'.join(map(str, self.shape))} {str(self.out_dtype)[6:]}{extra}"


def excess(case: GemmCase, device: torch.device | str = "cpu") -> float:
    """Largest error over what docs/nvfp4.md, sections 12.4 and 12.5, allow; at most 1 is right."""
    (M, N, K), (spec_a, axis_a, spec_b, axis_b) = case.shape, LAYOUTS[case.layout]
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, K, generator=generator) for rows in (M, N))
    if case.large:
        x, w = x * 2.0**60, w * 2.0**60
        x[:, :32], w[:, :32] = 0.0, 0.0
        x[:, 0], w[:, 16] = 2.0**78, 2.0**78
    if case.far_apart:
        x, w = x * 2.0**120, w * 2.0**-120
    bias = torch.randn(N, generator=generator) if case.bias else None
    if case.apart or case.one_entry:
        table = torch.randn(N, 4, generator=generator)
        bias = table[:, 1] if case.apart else table[0, :1].expand(N)
    sides = ((x, spec_a, axis_a), (w, spec_b, axis_b))
    kept = [(t if axis == 1 else t.t().contiguous(), spec, axis) for t, spec, axis in sides]
    left, right = (_operand(t, spec, axis, device) for t, spec, axis in kept)
    if case.transposed:
        left = replace(left, values=left.values.t().contiguous().t())
    reason = gemms.unsupported(left, right)
    assert reason is None, reason
    multiply = gemms.kernel_gemm(left, right, case.out_dtype, torch.float32 if case.bias else None)
    out = multiply(left, right, _on(bias, device)).cpu()
    a, b = (reference.quantize(t, spec, axis, None, None) for t, spec, axis in kept)
    on_fp8_cores = spec_a.format == "fp8" and torch.device(device).type == "cuda"
    return share_of_bound(out, a, b, bias, FP8_SUM_ERROR if on_fp8_cores else None)


def _operand(x: Tensor, spec: OperandSpec, axis: int, device: torch.device | str) -> ExactOperand:
    """An operand from the reference; FP8 with its contraction contiguous, as the fused kernel leaves it."""
    operand = reference.exact_operand(x, spec, axis, None, None)
    if spec.format != "fp8":
        return ExactOperand(operand.values.to(device), operand.scale.to(device), axis, spec)
    values = reference.quantize(x, spec, axis, None, None).codes.to(device).view(torch.float8_e4m3fn)
    return ExactOperand(values if axis == 1 else values.t(), operand.scale.to(device), axis, spec)


def _on(x: Tensor | None, device: torch.device | str) -> Tensor | None:
    return None if x is None else x.to(device)


#: computed by split-K
SPLIT = [
    GemmCase("wgrad", (40, 24, 720), bias=True),
    GemmCase("wgrad", (24, 40, 1200), torch.float32),
    GemmCase("wgrad", (24, 40, 1200), torch.float32, large=True),
    GemmCase("wgrad", (24, 40, 1200), torch.float32, far_apart=True),
    GemmCase("fprop", (40, 136, 272), torch.float32),  # nine steps in three parts
]
SMALL = [
    *(GemmCase(layout, (48, 80, 64), bias=True) for layout in LAYOUTS),
    *(GemmCase(layout, (33, 40, 50), torch.float32) for layout in LAYOUTS),
    *(GemmCase(layout, (33, 40, 50), bias=True, apart=True) for layout in ("fprop", "fp8 fprop")),
    *(GemmCase(layout, (33, 40, 50), bias=True, one_entry=True) for layout in ("fprop", "fp8 fprop")),
    GemmCase("fprop", (48, 80, 64), transposed=True),
    *(GemmCase("fprop", shape, torch.float32, large=True) for shape in ((48, 80, 64), (33, 40, 50))),
    *(GemmCase("fprop", shape, torch.float32, far_apart=True) for shape in ((48, 80, 64), (33, 40, 50))),
    *SPLIT,
    GemmCase("fp8 dgrad", (40, 136, 272), torch.float32),
    GemmCase("fp8 squares on the left", (136, 40, 144), torch.float32),
    GemmCase("fprop", (16, 16, 0), bias=True),
]


@triton.jit
def decoding_kernel(codes_ptr, values_ptr, MANTISSA: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(values_ptr + i, decoded(tl.load(codes_ptr + i), MANTISSA))


def wrongly_decoded(dtype: torch.dtype, device: torch.device | str = "cpu") -> list[int]:
    """FP8 codes that GPUs without FP8 tensor cores decode to other values than torch does."""
    codes = torch.arange(256, device=device).to(torch.uint8)
    values = torch.empty(256, device=device)
    options: dict[str, Any] = {"MANTISSA": 3 if dtype == torch.float8_e4m3fn else 2}
    decoding_kernel[(1,)](codes, values, **options)
    true = codes.view(dtype).float()
    equal = (values.view(torch.int32) == true.view(torch.int32)) | (values.isnan() & true.isnan())
    return codes[~equal].tolist()


def main() -> int:
    """Check the small GEMMs and FP8 codes; print the share of the bound that each GEMM uses."""
    prepare()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what is allocated and not yet written with NaN
    split: list[int] = []
    launch = TmaGemm.__call__

    def counting(gemm: TmaGemm, *operands: Tensor) -> Tensor:
        split.append(gemm.split_k)
        return launch(gemm, *operands)

    setattr(TmaGemm, "__call__", counting)  # noqa: B010
    shares = {case.name: excess(case) for case in SMALL}
    assert sum(parts > 1 for parts in split) == len(SPLIT), (
        "the GEMMs that are split are not those meant to be"
    )
    for name, share in shares.items():
        print(f"{name}: {share:.3f} of the bound")
    wrong = {dtype: wrongly_decoded(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
    print(*(f"{dtype} decodes {codes} to other values" for dtype, codes in wrong.items() if codes), sep="\n")
    return sum(not share <= 1 for share in shares.values()) + sum(map(len, wrong.values()))


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    sys.exit(main())
