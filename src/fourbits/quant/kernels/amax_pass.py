"""The launch that finds the amaxes of both operands of a tensor in one pass over it."""

from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.quant.kernels.allocate import allocator
from fourbits.quant.kernels.amax_triton import amax_kernel
from fourbits.quant.kernels.kernel_config import KernelConfig
from fourbits.quant.kernels.launcher import Launcher
from fourbits.quant.kernels.tiles import Shape, amax_options, amax_tile
from fourbits.quant.request import OperandInputs, OperandRequest

#: warps of an amax pass; each of its programs leaves a partial maximum
_WARPS = 1024


class AmaxPass:
    """Measures partial maxima of the row and the column operand, unless their amaxes are given."""

    __slots__ = ("_column", "_count", "_empty", "_launch", "_row", "_shape", "_size", "_stored", "_stride")

    def __init__(
        self,
        shape: Shape,
        stride: int,
        device: torch.device,
        requests: tuple[OperandRequest | None, OperandRequest | None],
        configs: tuple[KernelConfig | None, KernelConfig | None],
        scaled: bool = False,
    ) -> None:
        self._row, self._column = (
            request is not None and config is not None and config.target != 0.0 and request.amax != "given"
            for request, config in zip(requests, configs, strict=True)
        )
        self._stored = tuple(request is not None and request.amax == "stored" for request in requests)
        tile = amax_tile(shape, configs[1] if self._column else None)
        self._count = _WARPS // tile.warps if shape.on_gpu else 2
        self._size = self._count * (self._row + self._column)
        self._shape, self._stride, self._empty = shape, stride, allocator(device)
        self._launch = Launcher(
            amax_kernel,
            (self._count,),
            device,
            ROW=configs[0] if self._row else None,
            ROW_STORED=self._stored[0],
            COLUMN=configs[1] if self._column else None,
            COLUMN_STORED=self._stored[1],
            FIELDS=(0, 1, 2, 3, 4) if requests[1] is None else requests[1].key_fields,
            SCALED=scaled,
            **amax_options(shape, tile),
        )

    def __call__(
        self, x: Tensor, row: OperandInputs, column: OperandInputs
    ) -> "tuple[Amax | None, Amax | None]":
        """The amaxes of both operands in parts; given amaxes are returned unchanged."""
        given_row = None if row.amax is None else Amax(row.amax, 0, row.amax.numel())
        given_column = None if column.amax is None else Amax(column.amax, 0, column.amax.numel())
        if not (self._row or self._column):
            return given_row, given_column
        parts = self._empty((self._size,), (1,), torch.float32)
        first = self._size - self._count
        self._launch(
            *(x, self._stride, self._shape.M, self._shape.K),
            parts if column.factor is None else column.factor,
            *(parts, parts if row.amax is None else row.amax),
            *((parts, first), parts if column.amax is None else column.amax),
            *(parts if column.counter is None else column.counter, column.stream),
        )
        return (
            Amax(parts, 0, self._count) if self._row else given_row,
            Amax(parts, first, self._count) if self._column else given_column,
        )


class Amax(NamedTuple):
    """An amax in parts: the maximum of `count` elements of an fp32 tensor from `first` on."""

    parts: Tensor
    first: int
    count: int
