"""Launches of the fused quantizers: output tensors, tiles, grids."""
# pyright: reportCallIssue=false, reportArgumentType=false
# (kernels are launched with the options of their compiler)

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fourbits.quant.amax_triton import amax_kernel
from fourbits.quant.fp8_triton import fp8_kernel
from fourbits.quant.operands_triton import notes_kernel, operands_kernel
from fourbits.quant.packed_triton import packed_kernel
from fourbits.quant.plan import Fp8Plan, NoiseKey, Plan
from fourbits.quant.unpack_triton import unpack_kernel

#: warps of an amax pass; each of its programs leaves a partial maximum
_AMAX_WARPS = 1024
#: rows of a tile of which a thread can hold several columns
_SHORT = 32
#: programs whose notes are read at a time
_NOTES_CHUNK = 8192
#: whether kernels run in Triton's interpreter, on CPU tensors
INTERPRETED = type(operands_kernel) is not triton.JITFunction


class Tile(NamedTuple):
    """A program's tile, its warps, and how many neighbouring columns of a column operand one thread holds."""

    rows: int
    columns: int
    warps: int
    vector: int = 8


class Observed(NamedTuple):
    """What amax policies learn from: one entry for each program of a kernel, for the row and column plan."""

    #: fp32 [2, programs], largest magnitudes
    own: Tensor
    #: int32 [2, programs], saturated blocks
    saturated: Tensor


def amax_parts(
    x: Tensor,
    row: Plan | None,
    column: Plan | None,
    key: NoiseKey | None,
    stored: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Partial maxima of |y| for both plans in one read, fp32 [2, parts]; a missing plan's are not written.

    x: [M, K] with unit stride along K; key: of the column plan, needed where its signs are drawn; stored:
    fp32 scalars that take the place of the plans' own maxima unless they are negative.
    """
    tile = _amax_tile(x, column)
    count = _AMAX_WARPS // tile.warps if x.is_cuda else 2
    parts = torch.empty((2, count), dtype=torch.float32, device=x.device)
    entries, key_fields, stream = key or NoiseKey(parts)
    amax_kernel[(count,)](
        x,
        x.stride(0),
        x.shape[0],
        x.shape[1],
        parts[0],
        parts if stored[0] is None else stored[0],
        parts[1],
        parts if stored[1] is None else stored[1],
        entries,
        stream,
        ROW=row,
        ROW_STORED=stored[0] is not None,
        COLUMN=column,
        COLUMN_STORED=stored[1] is not None,
        FIELDS=key_fields,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STAGES=3,
        HARDWARE=x.is_cuda,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
    return parts


def exact(
    x: Tensor,
    row: Plan | None,
    column: Plan | None,
    amaxes: tuple[Tensor | None, Tensor | None],
    keys: tuple[NoiseKey | None, NoiseKey | None],
    observe: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor, Observed | None]:
    """Exact values for both plans in one read, bf16 in x's layout, and both global scales, fp32 [2].

    amaxes: fp32 vectors of partial maxima (or of one maximum), for plans with a scale of the whole tensor;
    all plans have one if `observe` asks for what amax policies learn from.
    """
    M, K = x.shape
    scales = torch.empty(2, dtype=torch.float32, device=x.device)
    row_values = None if row is None else _matrix(x, M, _up(K, 16))
    column_values = None if column is None else _matrix(x, _up(M, _group(column)), K)
    tile = _exact_tile(x, row, column)
    row_key, column_key = (key or NoiseKey(scales) for key in keys)
    row_amax, column_amax = (scales[:1] if amax is None else amax for amax in amaxes)
    row_out, column_out = (
        scales[None] if values is None else values for values in (row_values, column_values)
    )
    programs = _programs(x, tile)
    seen = _observed(x, programs) if observe else None
    operands_kernel[(programs,)](
        x,
        x.stride(0),
        M,
        K,
        row_out,
        row_out.stride(0),
        row_out.shape[1],
        row_amax,
        row_key.entries,
        row_key.stream,
        column_out,
        column_out.stride(0),
        column_out.shape[0],
        column_amax,
        column_key.entries,
        column_key.stream,
        scales,
        scales if seen is None else seen.own,
        scales if seen is None else seen.saturated,
        ROW=row,
        ROW_FIELDS=row_key.fields,
        ROW_PARTS=row_amax.shape[0],
        COLUMN=column,
        COLUMN_FIELDS=column_key.fields,
        COLUMN_PARTS=column_amax.shape[0],
        COLUMN_VECTOR=tile.vector,
        OBSERVE=observe,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        HARDWARE=x.is_cuda,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
    return row_values, column_values, scales, seen


def notes(
    seen: Observed, blocks: tuple[int, int], places: tuple[int, int], into: tuple[Tensor, Tensor]
) -> None:
    """Write largest magnitudes, saturated and all blocks of the row and the column plan.

    blocks: of each plan; places: where each belongs in `into`, fp32 [n] and int64 [n, 2 or more]; negative
    for a plan that is missing.
    """
    largest, counts = into
    notes_kernel[(sum(place >= 0 for place in places),)](
        seen.own,
        seen.saturated,
        seen.own.shape[1],
        0 if places[0] >= 0 else 1,
        *blocks,
        *places,
        largest,
        counts,
        counts.stride(0),
        CHUNK=_NOTES_CHUNK,
        num_warps=16,
    )


def packed(
    x: Tensor, plan: Plan, amax: Tensor | None, key: NoiseKey | None, swizzled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [R, Cp / 2] (8 bits: [R, Cp]), bytes of block scales, and the global scale.

    Scales are [ceil(R / r), ceil(Cp / c)], or flat as by `swizzle_scales`, whose padding is zero.
    """
    R, C = x.shape if plan.axis == 1 else x.shape[::-1]
    Cp = _up(C, _group(plan))
    block = (plan.block_rows, plan.block_columns)
    down, across = -(-R // block[1 - plan.axis]), -(-Cp // block[plan.axis])
    codes = torch.empty((R, Cp * plan.element.bits // 8), dtype=torch.uint8, device=x.device)
    if swizzled:
        scales = torch.zeros(_up(down, 128) * _up(across, 4), dtype=torch.uint8, device=x.device)
    else:
        scales = torch.empty((down, across), dtype=torch.uint8, device=x.device)
    global_scale = torch.empty(1, dtype=torch.float32, device=x.device)
    amax = global_scale if amax is None else amax
    entries, key_fields, stream = key or NoiseKey(global_scale)
    tile = _packed_tile(x, plan)
    packed_kernel[(_programs(x, tile),)](
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
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        HARDWARE=x.is_cuda,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
    return codes, scales, global_scale[0]


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
            COLUMN=column,
            HARDWARE=x.is_cuda,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return row_codes, row_scales, column_codes, column_scales


def _fp8_outputs(x: Tensor, plan: Fp8Plan | None, rows: int, length: int) -> tuple[Tensor, Tensor]:
    shape = (0, 0) if plan is None else (rows, _up(length, 16))
    codes = torch.empty(shape, dtype=torch.uint8, device=x.device)
    across = -(-shape[1] // 128)
    if plan is not None and plan.square:
        return codes, torch.empty((-(-rows // 128), across), dtype=torch.float32, device=x.device)
    scales = torch.empty((across, shape[0]), dtype=torch.float32, device=x.device)
    return codes, scales.t()  # products read the scales of many rows at once


def _exact_tile(x: Tensor, row: Plan | None, column: Plan | None) -> Tile:
    """For both operands 4 columns a thread, which leaves registers for more warps; for one 8, 16 bytes."""
    rows = max(_tall(row), _tall(column))
    if not x.is_cuda:
        return Tile(rows, 128, 4)
    if rows > _SHORT:
        return _wide(x, rows, 64, 1)
    if row is not None and column is not None:
        return _wide(x, rows, 256, 4)
    return _wide(x, max(8, rows), 1024, 8 if rows <= 16 else 4)


def _amax_tile(x: Tensor, column: Plan | None) -> Tile:
    if not x.is_cuda:
        return Tile(_tall(column), 128, 4)
    rows = max(16, _tall(column))
    return _wide(x, rows, 64, 1) if rows > _SHORT else _wide(x, rows, 512, 4)


def _packed_tile(x: Tensor, plan: Plan) -> Tile:
    if not x.is_cuda:
        return Tile(_tall(plan), 128, 4)
    rows = max(8, _tall(plan))
    return _wide(x, rows, 64, 1) if rows > _SHORT else _wide(x, rows, 1024, 8)


def _wide(x: Tensor, rows: int, columns: int, vector: int) -> Tile:
    """A tile of at most `columns` columns, fewer where that wastes less of x; all threads share a row."""
    while columns > 32 * vector and x.shape[1] % columns:
        columns //= 2
    return Tile(rows, columns, columns // (32 * vector), vector)


def _tall(plan: Plan | None) -> int:
    """Rows that a tile must keep together for a plan."""
    if plan is None:
        return 1
    return max(plan.block_rows, _group(plan)) if plan.axis == 0 else plan.block_rows


def _group(plan: Plan) -> int:
    """What a contraction is padded to: 16, or the size of the transform."""
    return max(16, plan.transform.size) if plan.transform is not None else 16


def _programs(x: Tensor, tile: Tile) -> int:
    """Programs that cover x; one for an empty x, to write its global scale."""
    return max(1, -(-x.shape[0] // tile.rows) * -(-x.shape[1] // tile.columns))


@functools.cache
def _converts(device: torch.device) -> bool:
    """Whether the card converts to E2M1 in hardware."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


def _observed(x: Tensor, programs: int) -> Observed:
    own = torch.empty((2, programs), dtype=torch.float32, device=x.device)
    return Observed(own, torch.empty((2, programs), dtype=torch.int32, device=x.device))


def _matrix(x: Tensor, rows: int, columns: int) -> Tensor:
    """Uninitialised bf16 [rows, columns] whose rows begin on 32 bytes, as bulk copies want."""
    return torch.empty((rows, _up(columns, 16)), dtype=torch.bfloat16, device=x.device)[:, :columns]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
