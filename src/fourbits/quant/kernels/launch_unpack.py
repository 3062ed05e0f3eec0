"""Launches that unpack codes and scales to values for a GEMM."""

import functools

import torch

from fourbits.quant.kernels.launcher import Launcher
from fourbits.quant.kernels.support import unsupported_device, unsupported_packed_spec
from fourbits.quant.kernels.tiles import matrix
from fourbits.quant.kernels.unpack_triton import unpack_kernel, unpack_transposed_kernel
from fourbits.quant.tensor import ExactOperand, QuantizedTensor


def unsupported_unpack(q: QuantizedTensor) -> str | None:
    """Why no kernel converts a packed operand to its exact form, or None."""
    if reason := unsupported_device(q.codes.device):
        return reason
    return unsupported_packed_spec(q.spec)


def lies_transposed(q: QuantizedTensor) -> bool:
    """Whether a column operand has its tensor's layout, in which a quantizing pass packs it."""
    return q.axis == 0 and not q.codes.is_contiguous() and q.codes.t().is_contiguous()


def unpacked(q: QuantizedTensor) -> ExactOperand:
    """The exact form of a packed operand that the kernels support."""
    size = q.spec.block_size
    assert size is not None
    power_of_two = q.spec.block_format.scale == "e8m0"
    scales, device = q.block_scale.view(torch.uint8), q.codes.device
    if lies_transposed(q):
        codes, scales = q.codes.t(), scales.t()
        pairs, K = codes.shape
        values = matrix(2 * pairs, K, device)
        if launch := transposed_launcher(device, pairs, K, size[1], power_of_two):
            launch(codes, scales, q.global_scale, values, 2 * pairs, values.stride(0), K)
        return ExactOperand(values, q.global_scale, 0, q.spec)
    R, width = q.codes.shape
    values = torch.empty((R, 2 * width), dtype=torch.bfloat16, device=device)
    if launch := launcher(device, R, width, size, power_of_two):
        launch(q.codes.contiguous(), scales.contiguous(), values, R, width, scales.shape[1])
    return ExactOperand(values, q.global_scale, 1, q.spec)


@functools.lru_cache(maxsize=4096)
def launcher(
    device: torch.device, R: int, width: int, block: tuple[int, int], power_of_two: bool
) -> Launcher | None:
    """The launch for codes [R, width], rows first; None if there are no codes."""
    on_gpu = device.type == "cuda"
    rows, length = (8, 512) if on_gpu else (16, 64)
    programs = -(-R // rows) * -(-width // length)
    if not programs:
        return None
    return Launcher(
        unpack_kernel,
        (programs,),
        device,
        BLOCK_ROWS=block[0],
        BLOCK=block[1],
        POWER_OF_TWO=power_of_two,
        ROWS=rows,
        BYTES=length,
        HARDWARE=on_gpu,
        num_warps=4,
        enable_fp_fusion=False,
    )


@functools.lru_cache(maxsize=4096)
def transposed_launcher(
    device: torch.device,
    pairs: int,
    K: int,
    block: int,
    power_of_two: bool,
    dequantized: tuple[int, torch.dtype] | None = None,
) -> Launcher | None:
    """The launch for codes [pairs of rows, K] in the layout of the tensor; None if there are no codes.

    dequantized: rows and dtype of values that are multiplied by the global scale, too. A launcher's integers
    and types are fixed.
    """
    on_gpu = device.type == "cuda"
    rows, columns = (16, 1024) if on_gpu else (16, 64)
    programs = -(-2 * pairs // rows) * -(-K // columns)
    if not programs:
        return None
    return Launcher(
        unpack_transposed_kernel,
        (programs,),
        device,
        BLOCK=block,
        POWER_OF_TWO=power_of_two,
        DEQUANTIZED=dequantized is not None,
        ROWS=rows,
        COLUMNS=columns,
        HARDWARE=on_gpu,
        num_warps=4,
        enable_fp_fusion=False,
    )
