"""Launches of the kernels that write or read codes: packed operands, their exact form, and FP8."""
# pyright: reportCallIssue=false, reportArgumentType=false
# (kernels are launched with the options of their compiler)

import functools

import torch
from torch import Tensor

from fourbits.quant.kernels.fp8_triton import fp8_kernel
from fourbits.quant.kernels.kernel_config import Fp8Plan, NoiseKey, Plan
from fourbits.quant.kernels.packed_triton import packed_kernel
from fourbits.quant.kernels.start_exact import SHORT, Tile, group, matrix, programs, rounded_up, tall, wide
from fourbits.quant.kernels.unpack_triton import unpack_kernel, unpack_turned_kernel

#: how a tile of 128 x 128 in FP8 is computed
_FP8_OPTIONS = {"num_warps": 8}


def packed(
    x: Tensor, plan: Plan, amax: Tensor | None, key: NoiseKey | None, swizzled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [R, Cp / 2] (8 bits: [R, Cp]), bytes of block scales, and the global scale.

    Scales are [ceil(R / r), ceil(Cp / c)], or flat as by `swizzle_scales`, whose padding is zero.
    """
    R, C = x.shape if plan.axis == 1 else x.shape[::-1]
    Cp = rounded_up(C, group(plan))
    block = (plan.block_rows, plan.block_columns)
    down, across = -(-R // block[1 - plan.axis]), -(-Cp // block[plan.axis])
    per_entry, dtype = (8, torch.int32) if plan.element.bits == 4 else (1, torch.uint8)
    codes = torch.empty((R, Cp // per_entry), dtype=dtype, device=x.device)
    if swizzled:
        scales = torch.zeros(
            rounded_up(down, 128) * rounded_up(across, 4), dtype=torch.uint8, device=x.device
        )
    else:
        scales = torch.empty((down, across), dtype=torch.uint8, device=x.device)
    global_scale = torch.empty(1, dtype=torch.float32, device=x.device)
    amax = global_scale if amax is None else amax
    entries, key_fields, stream = key or NoiseKey(global_scale)
    tile, held = _packed_tile(x, plan)
    packed_kernel[(programs(x, tile),)](
        x,
        x.stride(0),
        x.shape[0],
        x.shape[1],
        codes,
        R,
        codes.shape[1],
        scales,
        down,
        across,
        amax,
        global_scale,
        entries,
        stream,
        PLAN=plan,
        FIELDS=key_fields,
        PARTS=amax.shape[0],
        SWIZZLED=swizzled,
        E2M1X2=_converts(x.device) and plan.element.largest == 6.0,
        PADDED=Cp != C,
        HELD=held,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        HARDWARE=x.is_cuda,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
    return codes.view(torch.uint8), scales, global_scale[0]


def unpacked_turned(codes: Tensor, scales: Tensor, block: int, power_of_two: bool) -> Tensor:
    """Element times block scale, bf16 [Mp, K], from what `exact` gives of a packed column operand."""
    pairs, K = codes.shape
    out = matrix(codes, 2 * pairs, K)
    rows, columns = (16, 1024) if codes.is_cuda else (16, 64)
    count = -(-2 * pairs // rows) * -(-K // columns)
    if count:
        unpack_turned_kernel[(count,)](
            codes,
            scales,
            out,
            out.stride(0),
            K,
            BLOCK=block,
            POWER_OF_TWO=power_of_two,
            ROWS=rows,
            COLUMNS=columns,
            HARDWARE=codes.is_cuda,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def unpacked(codes: Tensor, scales: Tensor, block: tuple[int, int], power_of_two: bool) -> Tensor:
    """Element times block scale, bf16 [R, 2 * width]. codes: uint8 [R, width]; scales: bytes of `block`s."""
    R, width = codes.shape
    out = torch.empty((R, 2 * width), dtype=torch.bfloat16, device=codes.device)
    rows, length = (8, 512) if codes.is_cuda else (16, 64)
    programs = -(-R // rows) * -(-width // length)
    if programs:
        unpack_kernel[(programs,)](
            codes,
            scales.view(torch.uint8),
            out,
            R,
            width,
            scales.shape[1],
            BLOCK_ROWS=block[0],
            BLOCK=block[1],
            POWER_OF_TWO=power_of_two,
            ROWS=rows,
            BYTES=length,
            HARDWARE=codes.is_cuda,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def fp8(x: Tensor, row: Fp8Plan | None, column: Fp8Plan | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and fp32 block scales for both plans in one read, as stored: row [M, Kp] and column [K, Mp].

    Of a missing plan nothing is written.
    """
    M, K = x.shape
    row_codes, row_scales = _fp8_outputs(x, row, M, K)
    column_codes, column_scales = _fp8_outputs(x, column, K, M)
    tiles = -(-M // 128) * -(-K // 128)
    if tiles:
        fp8_kernel[(tiles,)](
            x,
            x.stride(0),
            M,
            K,
            row_codes,
            row_codes.shape[1],
            row_scales,
            row_scales.stride(0),
            row_scales.stride(1),
            column_codes,
            column_codes.shape[1],
            column_scales,
            column_scales.stride(0),
            column_scales.stride(1),
            ROW=row,
            ROW_PADDED=K % 16 != 0,
            COLUMN=column,
            COLUMN_PADDED=M % 16 != 0,
            HARDWARE=x.is_cuda,
            **_FP8_OPTIONS,
            enable_fp_fusion=False,
        )
    return row_codes.view(torch.uint8), row_scales, column_codes.view(torch.uint8), column_scales


def _fp8_outputs(x: Tensor, plan: Fp8Plan | None, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Codes as words of four, int32, and scales."""
    shape = (0, 0) if plan is None else (rows, rounded_up(length, 16))
    codes = torch.empty((shape[0], shape[1] // 4), dtype=torch.int32, device=x.device)
    across = -(-shape[1] // 128)
    if plan is not None and plan.square:
        return codes, torch.empty((-(-rows // 128), across), dtype=torch.float32, device=x.device)
    scales = torch.empty((across, shape[0]), dtype=torch.float32, device=x.device)
    return codes, scales.t()  # GEMMs read the scales of many rows at once


def _packed_tile(x: Tensor, plan: Plan) -> tuple[Tile, int]:
    """The tile, and how many neighbours along the contraction a thread reads (0: as they come)."""
    if not x.is_cuda:
        return Tile(tall(plan), 128, 4), min(16, tall(plan)) if plan.axis == 0 else 16
    rows = max(8, tall(plan))
    if plan.axis == 0 and plan.block_columns == 1 and rows <= SHORT:
        return Tile(128, 64, 8 * 16 // rows), rows
    if plan.axis == 1 and plan.block_rows == 1 and rows <= SHORT:
        return Tile(4, 1024, 4), plan.block_columns
    return (wide(x, rows, 64, 1) if rows > SHORT else wide(x, rows, 1024, 8)), 0


@functools.cache
def _converts(device: torch.device) -> bool:
    """Whether the card converts to E2M1 in hardware."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)
