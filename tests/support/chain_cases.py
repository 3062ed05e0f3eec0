"""GEMMs of the kernels with an FP4 tensor core's sums against the reference, for the interpreter and a GPU.

As a program it checks small cases in Triton's interpreter: TRITON_INTERPRET=1 python -m support.chain_cases
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import fourbits as fb
from fourbits.gemm import sums as dispatcher
from fourbits.gemm.kernels import launch_chain
from fourbits.gemm.kernels.chain_triton import DONE, EVERY_TERM, EXACT, add_toward_zero
from fourbits.gemm.reference.tensor_core import TENSOR_CORES, to_fp32, toward_zero
from fourbits.gemm.reference.tensor_core_paths import paths
from fourbits.gemm.sums import Epilogue, Sums
from fourbits.quant.cpu import compiled
from fourbits.quant.tensor import QuantizedTensor
from support import tensor_core_cases as operands
from support.assertions import as_bytes
from support.triton_interpreter import failures

Device = torch.device | str
#: operands along axis 0 in the interpreter, where the others are along axis 1
_ALONG_ROWS = {("data", "mxfp4"), ("wide", "nvfp4"), ("any bytes", "mxfp4")}
#: what `chain_kernel` may say of a tile
STATES = {EVERY_TERM.value: "every term", EXACT.value: "exact", DONE.value: "done"}


def reference(a: QuantizedTensor, b: QuantizedTensor, *given: Any, **settings: Any) -> Tensor:
    """`fb.matmul` without kernels."""
    found = launch_chain.unsupported
    dispatcher.launch_chain.unsupported = lambda a, b, core: "the reference is asked for"
    try:
        return fb.matmul(a, b, *given, **settings)
    finally:
        dispatcher.launch_chain.unsupported = found


def differences(
    pair: tuple[QuantizedTensor, QuantizedTensor],
    sums: Sums,
    device: Device,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    epilogue: Epilogue = "separate",
) -> list[str]:
    """What the kernels give for two operands in other bits than the reference; NaN of any payload is one."""
    a, b = pair
    extra = torch.randn(b.rows) if bias else None
    wanted = reference(a, b, dtype, extra, sums=sums, epilogue=epilogue)
    left, right = (operands.moved(q, device) for q in pair)
    there = None if extra is None else extra.to(device)
    found = fb.matmul(left, right, dtype, there, sums=sums, epilogue=epilogue).cpu()
    wrong = (as_bytes(found).view(-1, dtype.itemsize) != as_bytes(wanted).view(-1, dtype.itemsize)).any(1)
    wrong &= ~(found.isnan() & wanted.isnan()).flatten()
    return [f"{int(wrong.sum())} of {wrong.numel()} outputs differ"] if wrong.any() else []


def states(a: QuantizedTensor, b: QuantizedTensor, products: int, device: Device) -> set[str]:
    """Which paths the tiles of a GEMM take, if they are those of the reference's proof."""
    left, right = (operands.moved(q, device) for q in (a, b))
    layouts = launch_chain.stored(left), launch_chain.stored(right)
    gemm = launch_chain.chain_gemm(*layouts, products, torch.float32, None, left.codes.device)
    found = gemm.states(left, right).cpu()
    core, (height, width) = TENSOR_CORES["sm_100-fp4"], gemm.tile
    expected = paths(dispatcher._rows(a, core), dispatcher._rows(b, core), core, (height, width))
    return (
        {STATES[state] for state in found.unique().tolist()} if torch.equal(found.long(), expected) else set()
    )


def edge(octaves: int, last: int, seed: int) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Rows whose block 0 is `octaves` above the others, all in one direction, with odd last bits.

    last: scale bytes of the other blocks. Norms are then nearly the sums, so the proofs are at their edges.
    """
    torch.manual_seed(seed)
    made = []
    for rows in (17, 16):
        q = fb.quantize(torch.ones(rows, 128), fb.OperandSpec(), 1)
        codes = torch.full((rows, 128), 7, dtype=torch.uint8)
        codes[:, 16:] = torch.randint(0, 2, (rows, 112), dtype=torch.uint8)
        codes[:, 64] = torch.randint(0, 16, (rows,), dtype=torch.uint8)
        scales = torch.full((rows, 8), last, dtype=torch.uint8)
        scales[:, 0] = min(last + 8 * octaves, 0x7E)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        made.append(replace(q, codes=packed, block_scale=scales.view(torch.float8_e4m3fn)))
    return made[0], made[1]


def mixed() -> tuple[QuantizedTensor, QuantizedTensor]:
    """Rows like data, wide ones, and any bytes, in one operand; so tiles take all paths."""
    torch.manual_seed(0)
    a, b = (fb.quantize(torch.randn(rows, 144), fb.OperandSpec(), 1) for rows in (68, 18))
    any_bytes = operands.any_bytes((68, 144), fb.OperandSpec(), 1)
    codes, scales = a.codes.clone(), a.block_scale.view(torch.uint8).clone()
    codes[66:] = any_bytes.codes[66:]
    scales[66:] = any_bytes.block_scale.view(torch.uint8)[66:]
    scales[34, 2], scales[35, 5] = 0x7E, 0x10
    return replace(a, codes=codes, block_scale=scales.view(torch.float8_e4m3fn)), b


@triton.jit
def adding_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr, HARDWARE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, add_toward_zero(tl.load(a_ptr + i), tl.load(b_ptr + i), HARDWARE))


def wrongly_added(device: Device) -> list[str]:
    """Additions toward zero in other bits than FP64 gives, of all distances between exponents."""
    torch.manual_seed(0)
    a = torch.randn(4096) * torch.exp2(torch.randint(0, 40, (4096,)).float())
    b = torch.randn(4096) * torch.exp2(torch.randint(0, 40, (4096,)).float())
    a[:1000], b[:100] = (a[:1000] * 8).round(), -a[:100]
    a[4000:], b[3950:4050] = 0.0, 0.0
    out = torch.empty(4096, device=device)
    options: dict[str, Any] = {"HARDWARE": out.is_cuda, "SIZE": 4096, "enable_fp_fusion": False}
    adding_kernel[(1,)](a.to(device), b.to(device), out, **options)
    exact = a.double() + b.double()  # two FP32 numbers 40 octaves apart may need more bits, below FP64's last
    wrong = out.cpu() != to_fp32(toward_zero(exact, 23))
    return [f"{int(wrong.sum())} additions"] if wrong.any() else []


def checks(device: Device, large: bool = False) -> Iterator[tuple[object, Callable[[], list[str]]]]:
    """Everything, as (name, check). large: several tiles of a GPU."""
    yield "additions toward zero", lambda: wrongly_added(device)
    yield "mixed", lambda: differences(mixed(), "sm_100", device, torch.bfloat16, bias=True)
    yield "product of scales", lambda: differences(edge(4, 0x08, 0), "sm_103", device, epilogue="product")
    yield "paths", lambda: _paths(device)
    for octaves in range(0, 15, 1 if large else 2):
        for last in (0x01, 0x08, 0x0F, 0x10) if large else (0x0F if octaves % 4 else 0x01,):
            yield f"{octaves} octaves above {last}", _edge_check(octaves, last, device)
    for kind in operands.OPERANDS:
        for name in ("nvfp4", "mxfp4"):
            for axis in (0, 1) if large else (0 if (kind, name) in _ALONG_ROWS else 1,):
                yield f"{kind}, {name}, axis {axis}", _operand_check(kind, name, axis, device, large)


def _edge_check(octaves: int, last: int, device: Device) -> Callable[[], list[str]]:
    return lambda: differences(edge(octaves, last, octaves), "sm_100", device)


def _operand_check(kind: str, name: str, axis: int, device: Device, large: bool) -> Callable[[], list[str]]:
    M, N, K = (300, 270, 1360) if large else (17, 16, 144)

    def check() -> list[str]:
        torch.manual_seed(1)
        shapes = ((M, K), (N, K)) if axis else ((K, M), (K, N))
        a, b = (
            operands.OPERANDS[kind](shape, spec, axis)
            for shape, spec in zip(shapes, operands.SPECS[name], strict=True)
        )
        return differences((a, b), "sm_100" if axis else "sm_103", device)

    return check


def _paths(device: Device) -> list[str]:
    """Every way is taken by some case, and data takes the short one."""
    torch.manual_seed(0)
    a, b = (fb.quantize(torch.randn(rows, 208), fb.OperandSpec(), 1) for rows in (40, 33))
    found = {octaves: states(*edge(octaves, 0x08, 0), 64, device) for octaves in (0, 9, 14)}
    wrong = [] if states(a, b, 64, device) == {"done"} else ["data is not proven exact"]
    return wrong if set().union(*found.values()) == set(STATES.values()) else [*wrong, f"paths {found}"]


def main() -> int:
    """Check all cases in the interpreter."""
    compiled.COMPILE_FROM = 1 << 62  # pyright: ignore[reportConstantRedefinition]
    return min(100, failures(checks("cpu")))


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    sys.exit(main())
