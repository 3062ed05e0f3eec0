"""Launches that quantize a tensor to exact operands: row, column or both in one pass."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourbits.quant.kernels.allocate import allocator
from fourbits.quant.kernels.amax_pass import Amax, AmaxPass
from fourbits.quant.kernels.exact_triton import operands_kernel
from fourbits.quant.kernels.kernel_config import KernelConfig, kernel_config
from fourbits.quant.kernels.launch_stats import Stats
from fourbits.quant.kernels.launcher import Launcher
from fourbits.quant.kernels.tiles import (
    SEARCHED,
    SIXTEEN_WARPS,
    TWELVE_WARPS,
    Shape,
    Tile,
    exact_tile,
    group,
    programs,
    rounded_up,
)
from fourbits.quant.request import OperandInputs, OperandRequest, Signature, StatsTarget
from fourbits.quant.scale_codes import SCALE_DTYPES
from fourbits.quant.tensor import ExactOperand, QuantizedTensor

_DEFAULT_FIELDS = (0, 1, 2, 3, 4)
_NO_INPUTS = OperandInputs()
_SCALAR = (), (), torch.float32


class _Side(NamedTuple):
    """One operand of a pass; `config` is None if the pass does not compute it."""

    request: OperandRequest | None
    config: KernelConfig | None
    #: its index among the requested operands
    place: int


class ExactQuantizer:
    """Exact operands of tensors of one signature, at most one along each axis; the column may be packed."""

    def __init__(self, signature: Signature, requests: tuple[OperandRequest, ...]) -> None:
        M, K = signature.shape
        self.device, self.empty = signature.device, allocator(signature.device)
        self.copies = signature.strides[1] != 1
        self.stride = K if self.copies else signature.strides[0]
        self.shape = Shape(M, K, signature.device.type == "cuda")
        self.row, self.column = sides_of(requests)
        self.configs = self.row.config, self.column.config
        self.packed = self.column.request is not None and self.column.request.packed
        width = rounded_up(K, 16)
        #: (shape, strides, dtype) of what a call allocates
        self.values = None if self.row.config is None else ((M, width), (width, 1), torch.bfloat16)
        self.column_outputs = self._column_outputs(width)
        #: the kernel's arguments that follow the pointer of each output
        self.of_row = 1 if self.values is None else width, width
        self.column_stride = self.column_outputs[0][1][0] if self.column_outputs else 1
        self.column_rows = 0 if self.column.config is None else rounded_up(M, group(self.column.config))
        sides = self.row.request, self.column.request
        self.amaxes = AmaxPass(self.shape, self.stride, self.device, sides, self.configs, signature.scaled)
        self.scaled = signature.scaled
        self.tile = exact_tile(self.shape, *self.configs)
        self.stats = Stats(signature, sides, self.configs, self.tile)
        #: launchers by the number of partial maxima of each amax, and whether stats are recorded
        self.launchers: dict[tuple[int, int, bool], Launcher] = {}

    def __call__(
        self, x: Tensor, inputs: tuple[OperandInputs, ...], stats: StatsTarget | None = None
    ) -> tuple[ExactOperand | QuantizedTensor, ...]:
        """The operands, in the order of the requests. inputs: one per request; stats: where to record."""
        if self.copies:
            x = x.contiguous()
        row = _NO_INPUTS if self.row.config is None else inputs[self.row.place]
        column = _NO_INPUTS if self.column.config is None else inputs[self.column.place]
        amaxes, empty = self.amaxes(x, row, column), self.empty
        scale = column_scale = empty(*_SCALAR)
        if self.values is not None and self.column_outputs:
            column_scale = empty(*_SCALAR)
        values = scale if self.values is None else empty(*self.values)
        of_column = [empty(*output) for output in self.column_outputs] or [scale]
        self._launch(x, (row, column), amaxes, (scale, column_scale), values, of_column, stats)
        operands: list[ExactOperand | QuantizedTensor] = []
        if self.row.request is not None:
            operands.append(ExactOperand(values, scale, 1, self.row.request.spec))
        if self.column.request is not None:
            operands.append(self._column_operand(of_column, column_scale, self.column.request))
        in_order = self.row.place <= self.column.place or len(operands) == 1
        return tuple(operands) if in_order else (operands[1], operands[0])

    def _launch(
        self,
        x: Tensor,
        inputs: tuple[OperandInputs, OperandInputs],
        amaxes: tuple[Amax | None, Amax | None],
        scales: tuple[Tensor, Tensor],
        values: Tensor,
        of_column: list[Tensor],
        stats: StatsTarget | None,
    ) -> None:
        """Write both operands and their global scales, and record stats."""
        nothing, (row, column) = scales[0], inputs
        row_amax, column_amax = amaxes[0] or Amax(nothing, 0, 1), amaxes[1] or Amax(nothing, 0, 1)
        maxima = (nothing, nothing) if stats is None else self.stats.maxima()
        key = row_amax.count, column_amax.count, stats is not None
        launcher = self.launchers.get(key) or self._launcher(key[:2], key[2])
        launcher(
            *(x, self.stride, self.shape.M, self.shape.K),
            nothing if column.factor is None else column.factor,
            *(values, *self.of_row, (row_amax.parts, row_amax.first)),
            *(nothing if row.counter is None else row.counter, row.stream),
            *(of_column[0], self.column_stride, of_column[-1], self.column_rows),
            (column_amax.parts, column_amax.first),
            *(nothing if column.counter is None else column.counter, column.stream),
            *(*scales, *maxima),
        )
        if stats is not None:
            self.stats.record(maxima, (row_amax, column_amax), stats, (self.row.place, self.column.place))

    def _column_outputs(self, width: int) -> list[tuple[tuple[int, int], tuple[int, int], torch.dtype]]:
        """(shape, strides, dtype) of the column operand's values in aligned rows, or of codes and scales."""
        config, K = self.column.config, self.shape.K
        if config is None:
            return []
        rows = rounded_up(self.shape.M, group(config))
        if not self.packed:
            return [((rows, K), (width, 1), torch.bfloat16)]
        return [((height, K), (K, 1), torch.uint8) for height in (rows // 2, -(-rows // config.block_rows))]

    def _column_operand(
        self, outputs: list[Tensor], scale: Tensor, request: OperandRequest
    ) -> ExactOperand | QuantizedTensor:
        spec = request.spec
        if not self.packed:
            return ExactOperand(outputs[0], scale, 0, spec)
        codes, block_scale = outputs[0].t(), outputs[1].t().view(SCALE_DTYPES[spec.block_format.scale or ""])
        return QuantizedTensor(codes, block_scale, scale, 0, (self.shape.M, self.shape.K), spec)

    def _launcher(self, parts: tuple[int, int], recorded: bool) -> Launcher:
        row, column = self.row, self.column
        options: dict[str, Any] = {"num_warps": self.tile.warps}
        if limit := registers_of(self.tile, self.configs):
            options["maxnreg"] = limit
        launcher = self.launchers[*parts, recorded] = Launcher(
            operands_kernel,
            (programs(self.shape, self.tile),),
            self.device,
            ROW=row.config,
            ROW_FIELDS=_DEFAULT_FIELDS if row.request is None else row.request.key_fields,
            ROW_PARTS=parts[0],
            COLUMN=column.config,
            COLUMN_FIELDS=_DEFAULT_FIELDS if column.request is None else column.request.key_fields,
            COLUMN_PARTS=parts[1],
            COLUMN_PACKED=self.packed,
            COLUMN_VECTOR=self.tile.vector,
            ROW_HELD=self.tile.held,
            COLUMN_HELD=self.tile.column_held,
            OBSERVE=recorded,
            SCALED=self.scaled,
            ROWS=self.tile.rows,
            COLUMNS=self.tile.columns,
            HARDWARE=self.shape.on_gpu,
            enable_fp_fusion=False,
            **options,
        )
        return launcher


def registers_of(tile: Tile, configs: tuple[KernelConfig | None, KernelConfig | None]) -> int | None:
    """The most registers per thread, where a few more would let fewer programs run on an SM."""
    searches = any(config is not None and config.search for config in configs)
    if searches and tile.rows * tile.vector <= SEARCHED:
        return SIXTEEN_WARPS
    few = tile.rows * tile.vector <= 64 and None not in configs and not tile.held
    return TWELVE_WARPS if few else None


def sides_of(requests: tuple[OperandRequest, ...]) -> tuple[_Side, _Side]:
    """The row and the column operand of a pass."""
    sides = [_Side(None, None, -1), _Side(None, None, -1)]
    for place, request in enumerate(requests):
        config = kernel_config(request.spec, request.axis, request.packed)
        sides[1 - request.axis] = _Side(request, config, place)
    return sides[0], sides[1]
