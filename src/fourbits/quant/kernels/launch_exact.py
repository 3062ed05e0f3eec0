"""The launches that turn a tensor into exact operands: row, column or both from one pass."""

from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.quant.kernels.amax_pass import Amax, AmaxPass
from fourbits.quant.kernels.exact_triton import operands_kernel
from fourbits.quant.kernels.kernel_config import KernelConfig, kernel_config
from fourbits.quant.kernels.launch_stats import Stats
from fourbits.quant.kernels.launcher import Launcher
from fourbits.quant.kernels.tiles import Shape, exact_tile, group, matrix, programs, rounded_up
from fourbits.quant.request import OperandInputs, OperandRequest, Signature, StatsTarget
from fourbits.quant.scale_codes import SCALE_DTYPES
from fourbits.quant.tensor import ExactOperand, QuantizedTensor

#: registers per thread with which six programs of two warps share the 65,536 of an SM
_SIX_PROGRAMS = 168
_DEFAULT_FIELDS = (0, 1, 2, 3, 4)
_NO_INPUTS = OperandInputs()


class _Side(NamedTuple):
    """One operand of a pass; `config` None where there is none."""

    request: OperandRequest | None
    config: KernelConfig | None
    #: its place among the operands that are requested
    place: int


class ExactQuantizer:
    """Exact operands of tensors of one signature, at most one along each axis; the column may be packed."""

    def __init__(self, signature: Signature, requests: tuple[OperandRequest, ...]) -> None:
        M, K = signature.shape
        self.device = signature.device
        self.copies = signature.strides[1] != 1
        self.stride = K if self.copies else signature.strides[0]
        self.shape = Shape(M, K, signature.device.type == "cuda")
        self.row, self.column = _sides(requests)
        self.configs = self.row.config, self.column.config
        self.packed = self.column.request is not None and self.column.request.packed
        self.column_rows = 0 if self.column.config is None else rounded_up(M, group(self.column.config))
        self.row_width = rounded_up(K, 16)
        self.row_stride = 1 if self.row.config is None else rounded_up(K, 16)
        self.column_stride = K if self.packed else 1 if self.column.config is None else rounded_up(K, 16)
        self.amaxes = AmaxPass(
            self.shape, self.stride, self.device, (self.row.request, self.column.request), self.configs
        )
        self.tile = exact_tile(self.shape, *self.configs)
        self.stats = Stats(signature, (self.row.request, self.column.request), self.configs, self.tile)
        #: launchers by how many partial maxima each amax has, and whether stats are recorded
        self.launchers: dict[tuple[int, int, bool], Launcher] = {}

    def __call__(
        self, x: Tensor, inputs: tuple[OperandInputs, ...], stats: StatsTarget | None = None
    ) -> tuple[ExactOperand | QuantizedTensor, ...]:
        """The operands, in the order of the requests. inputs: one per request; stats: where to record."""
        if self.copies:
            x = x.contiguous()
        row = inputs[self.row.place] if self.row.config is not None else None
        column = inputs[self.column.place] if self.column.config is not None else None
        amaxes = self.amaxes(x, row, column)
        scales = self._scales()
        values, of_column = self._launched(x, (row, column), amaxes, scales, stats)
        row_scale, column_scale = scales
        found: list[ExactOperand | QuantizedTensor] = []
        for place in range(len(inputs)):
            if self.row.request is not None and place == self.row.place:
                found.append(ExactOperand(values, row_scale, 1, self.row.request.spec))
            else:
                found.append(self._column_operand(of_column, column_scale))
        return tuple(found)

    def _launched(
        self,
        x: Tensor,
        inputs: tuple[OperandInputs | None, OperandInputs | None],
        amaxes: tuple[Amax | None, Amax | None],
        scales: tuple[Tensor, Tensor],
        stats: StatsTarget | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Values of the row operand, and of the column operand its values or its codes and scales."""
        M, K = self.shape.M, self.shape.K
        row, column = (side or _NO_INPUTS for side in inputs)
        nothing = scales[0]
        values = nothing if self.row.config is None else matrix(M, self.row_width, self.device)
        of_column = self._column_outputs(nothing)
        row_amax, column_amax = (Amax(nothing, 0, 1) if amax is None else amax for amax in amaxes)
        maxima = (nothing, nothing) if stats is None else self.stats.maxima()
        parts = row_amax.count, column_amax.count
        launcher = self.launchers.get((*parts, stats is not None)) or self._launcher(parts, stats is not None)
        launcher(
            *(x, self.stride, M, K),
            *(values, self.row_stride, self.row_width, row_amax.pointer),
            *(nothing if row.counter is None else row.counter, row.stream),
            *(of_column[0], self.column_stride, of_column[-1], self.column_rows, column_amax.pointer),
            *(nothing if column.counter is None else column.counter, column.stream),
            *(*scales, *maxima),
        )
        if stats is not None:
            self.stats.record(maxima, (row_amax, column_amax), stats, (self.row.place, self.column.place))
        return values, of_column

    def _scales(self) -> tuple[Tensor, Tensor]:
        """Room for both global scales; one stands for both where there is one operand."""
        row = torch.empty((), dtype=torch.float32, device=self.device)
        if self.row.config is None or self.column.config is None:
            return row, row
        return row, torch.empty((), dtype=torch.float32, device=self.device)

    def _column_outputs(self, nothing: Tensor) -> tuple[Tensor, ...]:
        """Room for the column operand: its values; its codes and block scales, in the layout of x."""
        config, K = self.column.config, self.shape.K
        if config is None:
            return (nothing,)
        if not self.packed:
            return (matrix(self.column_rows, K, self.device),)
        heights = self.column_rows // 2, -(-self.column_rows // config.block_rows)
        return tuple(torch.empty((rows, K), dtype=torch.uint8, device=self.device) for rows in heights)

    def _column_operand(self, outputs: tuple[Tensor, ...], scale: Tensor) -> ExactOperand | QuantizedTensor:
        assert self.column.request is not None
        spec = self.column.request.spec
        if not self.packed:
            return ExactOperand(outputs[0], scale, 0, spec)
        codes, block_scale = outputs[0].t(), outputs[1].t().view(SCALE_DTYPES[spec.block_format.scale or ""])
        return QuantizedTensor(codes, block_scale, scale, 0, (self.shape.M, self.shape.K), spec)

    def _launcher(self, parts: tuple[int, int], recorded: bool) -> Launcher:
        row, column = self.row, self.column
        options: dict[str, int] = {"num_warps": self.tile.warps}
        if recorded and self.tile.warps == 2 and None not in self.configs:
            options["maxnreg"] = _SIX_PROGRAMS
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
            OBSERVE=recorded,
            ROWS=self.tile.rows,
            COLUMNS=self.tile.columns,
            HARDWARE=self.shape.on_gpu,
            enable_fp_fusion=False,
            **options,
        )
        return launcher


def _sides(requests: tuple[OperandRequest, ...]) -> tuple[_Side, _Side]:
    """The row and the column operand of a pass."""
    sides = [_Side(None, None, -1), _Side(None, None, -1)]
    for place, request in enumerate(requests):
        config = kernel_config(request.spec, request.axis, request.packed)
        sides[1 - request.axis] = _Side(request, config, place)
    return sides[0], sides[1]
