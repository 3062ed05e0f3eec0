"""Launches that quantize groups of rows: the map of tiles, an amax pass, one launch for all operands."""

from typing import Any

import torch
from torch import Tensor

from fourbits.quant.grouped_layout import GroupedOperand, GroupTiles, most_tiles
from fourbits.quant.kernels.allocate import allocator
from fourbits.quant.kernels.grouped_triton import (
    grouped_amax_kernel,
    grouped_operands_kernel,
    tile_map_kernel,
)
from fourbits.quant.kernels.launch_exact import registers_of, sides_of
from fourbits.quant.kernels.launcher import Launcher
from fourbits.quant.kernels.tiles import Shape, amax_options, amax_tile, exact_tile, rounded_up
from fourbits.quant.request import OperandRequest, Signature

#: entries of the map that a program fills; programs that share an entry in the amax pass
_ENTRIES, _PARTS = 16, 4
_FIELDS = (0, 1, 2, 3, 4)


class TileMap:
    """Computes maps of tiles of one height, for a fixed number of rows and of groups."""

    def __init__(self, rows: int, groups: int, height: int, device: torch.device) -> None:
        self.tiles, self.groups, self.height = most_tiles(rows, groups, height), groups, height
        self.empty = allocator(device)
        self.launch = Launcher(
            tile_map_kernel,
            (max(1, -(-self.tiles // _ENTRIES)),),
            device,
            HEIGHT=height,
            GROUPS=1 << max(0, groups - 1).bit_length(),
            TILES=_ENTRIES,
            num_warps=4,
        )

    def __call__(self, offsets: Tensor) -> GroupTiles:
        """The map. offsets: int32 [groups + 1]."""
        entries = self.empty((self.tiles, 4), (4, 1), torch.int32)
        starts = self.empty((self.groups + 1,), (1,), torch.int32)
        self.launch(offsets, entries, starts, self.tiles, self.groups)
        return GroupTiles(entries, starts, self.height)


class GroupedQuantizer:
    """Computes exact operands of groups for tensors of one signature, at most one along each axis."""

    def __init__(
        self,
        signature: Signature,
        groups: int,
        tiles: tuple[int, int],
        requests: tuple[OperandRequest, ...],
        padded: bool,
        key_stride: int,
    ) -> None:
        M, K = signature.shape
        self.empty, self.device = allocator(signature.device), signature.device
        self.copies = signature.strides[1] != 1
        self.stride = K if self.copies else signature.strides[0]
        self.K, self.groups, self.key_stride = K, groups, key_stride
        self.row, self.column = sides_of(requests)
        self.requests = requests
        (count, height), self.width = tiles, rounded_up(K, 16)
        #: rows of the row and of the column operand
        self.heights = count * height if padded else M, count * height
        self.configs = self.row.config, self.column.config
        self.scaled = tuple(config is not None and config.target != 0.0 for config in self.configs)
        shape = Shape(M, K, signature.device.type == "cuda")
        self.quantize = self._quantizing(shape, count, height, padded)
        self.measure = self._measuring(shape, count)

    def _quantizing(self, shape: Shape, count: int, height: int, padded: bool) -> Launcher:
        """The launch that quantizes, over a map of `count` tiles of `height` rows."""
        tile = exact_tile(shape, *self.configs)
        assert height % tile.rows == 0, "a tile of the map holds whole tiles of the quantizer"
        options: dict[str, Any] = {"num_warps": tile.warps}
        if limit := registers_of(tile, self.configs):
            options["maxnreg"] = limit
        return Launcher(
            grouped_operands_kernel,
            (count * (height // tile.rows) * max(1, -(-shape.K // tile.columns)),),
            self.device,
            ROW=self.configs[0],
            ROW_FIELDS=_fields(self.row.request),
            ROW_PADDED=padded,
            ROW_HELD=tile.held,
            COLUMN=self.configs[1],
            COLUMN_FIELDS=_fields(self.column.request),
            COLUMN_VECTOR=tile.vector,
            COLUMN_HELD=tile.column_held,
            HEIGHT=height,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            HARDWARE=shape.on_gpu,
            enable_fp_fusion=False,
            **options,
        )

    def _measuring(self, shape: Shape, count: int) -> Launcher:
        """The launch that finds the groups' amaxes."""
        row, column = (
            config if scaled else None for config, scaled in zip(self.configs, self.scaled, strict=True)
        )
        tile = amax_tile(shape, column)
        return Launcher(
            grouped_amax_kernel,
            (count * _PARTS,),
            self.device,
            ROW=row,
            COLUMN=column,
            FIELDS=_fields(self.column.request),
            PARTS=_PARTS,
            **amax_options(shape, tile),
        )

    def __call__(
        self, x: Tensor, tiles: GroupTiles, keys: Tensor | None, streams: tuple[int, ...]
    ) -> tuple[GroupedOperand, ...]:
        """The operands, in the order of the requests. keys: counters; streams: of group 0, by request."""
        if self.copies:
            x = x.contiguous()
        groups, width = self.groups, self.width
        amax = self.amaxes(x, tiles, keys, streams)
        key = amax if keys is None else keys
        scale = self.empty((2, groups), (groups, 1), torch.float32)
        values = [
            self.empty((rows, width), (width, 1), torch.bfloat16) if side.config is not None else scale
            for side, rows in zip((self.row, self.column), self.heights, strict=True)
        ]
        self.quantize(
            *(x, self.stride, self.K, tiles.entries, key, self.key_stride),
            *(values[0], width, width, (amax, 0), (scale, 0), self._stream(self.row.place, streams)),
            *(values[1], width, (amax, groups), (scale, groups)),
            self._stream(self.column.place, streams),
        )
        return tuple(
            GroupedOperand(values[1 - request.axis], scale[1 - request.axis], request.axis, request.spec)
            for request in self.requests
        )

    def amaxes(self, x: Tensor, tiles: GroupTiles, keys: Tensor | None, streams: tuple[int, ...]) -> Tensor:
        """The groups' amaxes of the row and of the column operand, fp32 [2, groups]; 0 if unused."""
        bits = torch.zeros((2, self.groups), dtype=torch.int32, device=self.device)
        if any(self.scaled):
            self.measure(
                *(x, self.stride, self.K, tiles.entries, (bits, 0), (bits, self.groups)),
                *(bits if keys is None else keys, self.key_stride),
                self._stream(self.column.place, streams),
            )
        return bits.view(torch.float32)

    def _stream(self, place: int, streams: tuple[int, ...]) -> int:
        return streams[place] if place >= 0 else 0


def _fields(request: OperandRequest | None) -> tuple[int, ...]:
    return _FIELDS if request is None else request.key_fields
