"""The sums that a GEMM can be asked for: FP32 in any order, exact, or those of one chip's tensor cores.

docs/nvfp4.md, section 22.
"""

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from fourbits.formats.descriptors import E2M1
from fourbits.gemm.reference.matmul import exact_sums, finish, segments, tensor_scales
from fourbits.gemm.reference.tensor_core import TENSOR_CORES, TensorCore
from fourbits.gemm.reference.tensor_core_paths import EVERY_TERM, EXACT, SHORT, paths
from fourbits.gemm.reference.tensor_core_sums import Rows, chained_sum
from fourbits.quant.operand import OperandSpec
from fourbits.quant.tensor import QuantizedTensor
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.gemm.kernels import launch_chain

#: fp32: in the order of the device's own GEMM; exact: one rounding to nearest; a chip: as its tensor cores
Sums = Literal["fp32", "exact", "sm_100", "sm_103", "sm_90", "sm_90_fp8"]
#: separate: (sum * S_a) * S_b; product: sum * (S_a * S_b)
Epilogue = Literal["separate", "product"]


def unsupported_sums(sums: str, a: OperandSpec, b: OperandSpec) -> str | None:
    """Why the sums of a and b cannot be computed as a setting asks, or None."""
    if sums not in get_args(Sums):
        return f"must be one of {', '.join(get_args(Sums))}, got {sums!r}"
    if not (a.block_format.quantized and b.block_format.quantized):
        return f"needs two quantized operands, got {a.format} and {b.format}" if sums != "fp32" else None
    if sums in ("fp32", "exact") or _instruction(sums, a, b) is not None:
        return None
    return f"{sums} has no instruction for {_described(a)} by {_described(b)}"


def matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    sums: str,
    epilogue: str = "separate",
    alpha: Tensor | None = None,
) -> Tensor:
    """GEMM of stored rows [M, K] and [N, K] -> [M, N] in out_dtype, with these sums, which support a and b.

    alpha: fp32 scalar that multiplies the sums in place of both global scales.
    """
    scales = tensor_scales(a, b)
    if alpha is not None:
        scales = alpha, torch.ones((), dtype=torch.float32, device=alpha.device)
    elif epilogue == "product":
        scales = scales[0] * scales[1], torch.ones((), dtype=torch.float32, device=scales[0].device)
    if sums == "exact":
        return finish(exact_sums(a, b)[0], *scales, out_dtype, bias)
    core = _instruction(sums, a.spec, b.spec)
    assert core is not None, "the caller has asked unsupported_sums"
    if HAS_TRITON and launch_chain.unsupported(a, b, core) is None:
        return launch_chain.matmul(a, b, core.products, out_dtype, scales, bias)
    return finish(_chained(a, b, core), *scales, out_dtype, bias)


def without_host(sums: str, a: OperandSpec, b: OperandSpec, device: torch.device) -> bool:
    """Whether GEMMs with these sums run without a decision on the host, as CUDA graphs require."""
    core = None if sums in ("fp32", "exact") else _instruction(sums, a, b)
    if core is None:
        return sums == "fp32"
    return HAS_TRITON and launch_chain.unsupported_core(core, device) is None


def shares_of_paths(a: QuantizedTensor, b: QuantizedTensor, sums: str) -> tuple[float, float, float]:
    """Shares of the tiles of a GEMM of FP4 operands by their cost on a GPU: one dot per instruction, no term
    truncated, every term needed. sums: sm_100 or sm_103.
    """
    core = _instruction(sums, a.spec, b.spec)
    assert core is not None, "the caller has asked unsupported_sums"
    found = paths(_rows(a, core), _rows(b, core), core).flatten().tolist()
    short, exactly, every = (found.count(path) / len(found) for path in (SHORT, EXACT, EVERY_TERM))
    return short, exactly, every


def _instruction(sums: str, a: OperandSpec, b: OperandSpec) -> TensorCore | None:
    """The instruction that multiplies operands of two specs, or None."""
    kinds = {_kind(sums, spec) for spec in (a, b)}
    kind = kinds.pop()
    core = TENSOR_CORES.get(kind) if kind is not None and not kinds else None
    alike = a.block_format.scale == b.block_format.scale  # FP4 instructions take one format of scales
    return core if core is None or core.group == 1 or alike else None


def _kind(sums: str, spec: OperandSpec) -> str | None:
    """The name of the instruction that takes an operand, or None."""
    fmt, size = spec.block_format, spec.block_size
    one_level = fmt.scale in ("e4m3", "e8m0") and not (fmt.outer_block or fmt.scale_groups)
    blackwell = sums in ("sm_100", "sm_103")
    if fmt.scale == "fp32" and fmt.element is not None and fmt.element.dtype is not None:
        if sums == "sm_90":
            return None
        return "sm_90-fp8" if sums == "sm_90_fp8" else "sm_100-fp8" if size is None else None
    if not one_level or size is None or size[1] % 16:
        return None
    if sums == "sm_90":
        return "sm_90-bf16"
    if blackwell and fmt.element is E2M1:
        return f"{sums}-fp4" if size[1] in (16, 32) else None
    return "sm_100-mxfp8" if blackwell and fmt.scale == "e8m0" and size[1] == 32 else None


def _described(spec: OperandSpec) -> str:
    size = spec.block or spec.block_format.block or (0, 0)
    return f"{spec.format} {size[0]}x{size[1]}"


def _chained(a: QuantizedTensor, b: QuantizedTensor, core: TensorCore) -> Tensor:
    """The sums before the scales of tensors: fp32 [M, N]. Sums under FP32 scales of blocks are scaled in FP32
    where they end, at most every 128 of K, and added in FP32. Zeros for K = 0, and on the meta device.
    """
    if not a.contraction_size or a.codes.is_meta:
        return torch.zeros((a.rows, b.rows), dtype=torch.float32, device=a.codes.device)
    left, right = _rows(a, core), _rows(b, core)
    blocks = [q.spec.block_size if q.spec.block_format.scale_in_epilogue else None for q in (a, b)]
    if blocks == [None, None]:
        return chained_sum(left, right, core)
    total = torch.zeros((a.rows, b.rows), dtype=torch.float32, device=a.codes.device)
    lengths = tuple(0 if size is None else size[1] for size in blocks)
    for first, last in segments(left.elements.shape[1], lengths):
        part = chained_sum(left.part(first, last - first), right.part(first, last - first), core)
        for axis, (q, size) in enumerate(zip((a, b), blocks, strict=True)):
            if size is not None:
                scale = q.block_scale[:, first // size[1]].repeat_interleave(size[0])[: q.rows]
                part = part * scale.unsqueeze(1 - axis)
        total = total + part
    return total


def _rows(q: QuantizedTensor, core: TensorCore) -> Rows:
    """An operand as an instruction takes it."""
    if core.operands[0] == torch.bfloat16:  # element times scale, which BF16 holds
        return Rows(q.block_values().to(torch.bfloat16), None)
    element, size = q.spec.block_format.element, q.spec.block_size
    assert element is not None
    codes = q.element_codes()
    elements = codes if element.dtype is None else codes.view(element.dtype)
    if not core.scale_blocks or size is None:
        return Rows(elements, None)
    missing = -elements.shape[1] % size[1]
    if missing:
        elements = torch.cat((elements, elements.new_zeros((elements.shape[0], missing))), 1)
    scales = q.block_scale.view(torch.uint8).repeat_interleave(size[0], 0)[: q.rows]
    return Rows(elements, scales.view(q.block_scale.dtype))


def check_sums(
    a: QuantizedTensor, b: QuantizedTensor, sums: str, epilogue: str, alpha: Tensor | None
) -> None:
    """Raises ValueError for sums, an epilogue or alpha that operands of a and b do not have."""
    if epilogue not in get_args(Epilogue):
        raise ValueError(
            f"matmul: epilogue must be separate or product, got {epilogue!r}. Pass separate, as FP4 tensor "
            "cores compute."
        )
    if sums == "fp32":
        asked = "epilogue" if alpha is None else "alpha"
        raise ValueError(
            f"matmul: {asked} needs sums other than fp32, whose kernels have one epilogue, got {sums!r}. Set "
            f"sums, or remove {asked}."
        )
    if reason := unsupported_sums(sums, a.spec, b.spec):
        raise ValueError(f"matmul: sums: {reason}. Use sums='fp32'.")
    if alpha is not None and (alpha.dtype != torch.float32 or alpha.numel() != 1):
        raise ValueError(
            f"matmul: alpha must be one float32 number, got {alpha.dtype} {list(alpha.shape)}. Convert it."
        )
    if alpha is not None and epilogue != "separate":
        raise ValueError("matmul: alpha replaces both global scales, and takes no epilogue. Remove one.")
