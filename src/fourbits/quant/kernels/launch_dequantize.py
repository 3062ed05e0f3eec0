"""Launches that dequantize packed operands, or transpose packed operands with square blocks."""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fourbits.quant.kernels.dequantize_triton import (
    dequantize_kernel,
    dequantize_transposed_kernel,
    transpose_kernel,
)
from fourbits.quant.kernels.launch_unpack import lies_transposed, transposed_launcher, unsupported_unpack
from fourbits.quant.kernels.launcher import Launcher
from fourbits.quant.kernels.tiles import rounded_up
from fourbits.quant.tensor import QuantizedTensor

#: rows, entries of a row, warps; a thread has one entry of every row
_ROW_TILE = (2, 64, 2)
#: words of a column, columns, warps
_COLUMN_TILE = (4, 128, 2)
#: rows / 8, words of a row, warps
_TRANSPOSED_TILE = (32, 16, 4)
_SQUARES = (16, 32)


def unsupported_dequantize(q: QuantizedTensor, dtype: torch.dtype) -> str | None:
    """Why no kernel dequantizes a packed operand to a dtype, or None."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{dtype} has no kernel"
    return unsupported_unpack(q)


def unsupported_transpose(q: QuantizedTensor) -> str | None:
    """Why no kernel transposes a packed operand, or None. Callers check that its blocks are square."""
    size = q.spec.block_size
    if size is None or size[0] != size[1] or size[0] not in _SQUARES or q.spec.rht:
        return f"blocks must be NxN for N in {_SQUARES} without a transform, got {size}"
    return unsupported_unpack(q)


def dequantized(q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Values of a packed operand that the kernels support, in the original shape."""
    block = q.spec.block_size
    assert block is not None
    power_of_two, device = q.spec.block_format.scale == "e8m0", q.codes.device
    codes, scales = q.codes, q.block_scale.view(torch.uint8)
    size = 2 * codes.shape[1] if q.spec.rht else q.contraction_size
    shape = (q.rows, size) if q.axis == 1 else (size, q.rows)
    out = torch.empty(shape, dtype=dtype, device=device)
    if not out.numel():
        return out
    if lies_transposed(q):
        codes, scales = codes.t(), scales.t()
        launch = transposed_launcher(device, *codes.shape, block[1], power_of_two, (size, dtype))
        assert launch is not None
        launch(codes, scales, q.global_scale, out, size, q.rows, q.rows)
        return out
    per, entry = (4, torch.int16) if q.axis == 1 and dtype == torch.float32 else (8, torch.int32)
    entries = codes.reshape(-1).view(entry)
    R, width = codes.shape[0], 2 * codes.shape[1] // per
    launch = dequantizer(device, (R, size, width), q.axis, block, power_of_two, dtype)
    extents = (R, size) if q.axis == 1 else (size, R)
    launch(entries, scales.contiguous(), q.global_scale, out, *extents, width, scales.shape[1])
    return out


@functools.lru_cache(maxsize=4096)
def dequantizer(
    device: torch.device,
    extents: tuple[int, int, int],
    axis: int,
    block: tuple[int, int],
    power_of_two: bool,
    dtype: torch.dtype,
) -> Launcher:
    """The launch for stored codes. extents: rows, elements and entries of a row; dtype: the output's."""
    R, size, width = extents
    del dtype  # part of the key: a launcher's types are fixed
    on_gpu = device.type == "cuda"
    common: dict[str, Any] = {"BLOCK_ROWS": block[0], "BLOCK": block[1], "POWER_OF_TWO": power_of_two}
    common |= {"HARDWARE": on_gpu, "enable_fp_fusion": False}
    if axis == 1:
        rows, length, warps = _ROW_TILE if on_gpu else (4, 16, 4)
        grid = (-(-R // rows) * -(-width // length),)
        return Launcher(dequantize_kernel, grid, device, ROWS=rows, ENTRIES=length, num_warps=warps, **common)
    words, columns, warps = _COLUMN_TILE if on_gpu else (8, 16, 4)
    grid = (-(-size // (8 * words)) * -(-R // columns),)
    return Launcher(
        dequantize_transposed_kernel, grid, device, WORDS=words, COLUMNS=columns, num_warps=warps, **common
    )


def transposed(q: QuantizedTensor) -> QuantizedTensor:
    """The operand of the transposed tensor, for square blocks that the kernels support."""
    size = q.spec.block_size
    assert size is not None
    R, C, device = q.rows, q.contraction_size, q.codes.device
    scales = q.block_scale.view(torch.uint8).contiguous()
    out = torch.empty((C, rounded_up(R, 16) // 8), dtype=torch.int32, device=device)
    out_scales = torch.empty((scales.shape[1], scales.shape[0]), dtype=torch.uint8, device=device)
    if out.numel():
        words, width = q.codes.reshape(-1).view(torch.int32), q.codes.shape[1] // 4
        launch = transposer(device, R, C, width, size[0])
        launch(words, scales, out, out_scales, R, width, C, out.shape[1], *scales.shape)
    return replace(
        q,
        codes=out.view(torch.uint8),
        block_scale=out_scales.view(q.block_scale.dtype),
        shape=(q.shape[1], q.shape[0]),
    )


@functools.lru_cache(maxsize=4096)
def transposer(device: torch.device, R: int, C: int, width: int, block: int) -> Launcher:
    """The launch for codes [R, width] in words, whose rows have C elements."""
    del C  # part of the key: a launcher's integers are fixed
    eights, words, warps = _TRANSPOSED_TILE
    return Launcher(
        transpose_kernel,
        (-(-R // (8 * eights)) * -(-width // words),),
        device,
        BLOCK=block,
        EIGHTS=eights,
        WORDS=words,
        num_warps=warps,
    )
