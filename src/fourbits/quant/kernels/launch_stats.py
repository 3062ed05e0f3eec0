"""The launch that reduces the block maxima of a quantizing pass to the statistics of amax policies."""
# pyright: reportCallIssue=false, reportArgumentType=false
# (kernels are launched with the options of their compiler)

import torch
from torch import Tensor

from fourbits.quant.kernels.amax_pass import Amax
from fourbits.quant.kernels.exact_triton import stats_kernel
from fourbits.quant.kernels.kernel_config import KernelConfig
from fourbits.quant.kernels.tiles import Shape, Tile, programs, rounded_up
from fourbits.quant.request import OperandRequest, Signature, StatsTarget

#: maxima that a program reads at a time, and the largest number of programs
_CHUNK, _PROGRAMS = 4096, 1024


class Stats:
    """Reduces block maxima to the largest magnitudes and saturated blocks of both operands of a pass."""

    def __init__(
        self,
        signature: Signature,
        requests: tuple[OperandRequest | None, OperandRequest | None],
        configs: tuple[KernelConfig | None, KernelConfig | None],
        tile: Tile,
    ) -> None:
        self._device, self._configs = signature.device, configs
        count = programs(Shape(*signature.shape, signature.device.type == "cuda"), tile)
        self._entries = tuple(
            0 if c is None else count * (tile.rows // c.block_rows) * (tile.columns // c.block_columns)
            for c in configs
        )
        self._blocks = tuple(0 if r is None else _number_of_blocks(signature.shape, r) for r in requests)

    def maxima(self) -> tuple[Tensor, Tensor]:
        """Allocate the block maxima of all tiles, fp32, for both operands."""
        row, column = (
            torch.empty(max(1, count), dtype=torch.float32, device=self._device) for count in self._entries
        )
        return row, column

    def record(
        self,
        maxima: tuple[Tensor, Tensor],
        amaxes: tuple[Amax, Amax],
        target: StatsTarget,
        order: tuple[int, int],
    ) -> None:
        """Add the stats to the target. amaxes: in parts; order: indices of row and column in the requests."""
        places = [target.places[i] if i >= 0 else -1 for i in order]
        entries = max(self._entries)
        sides = [
            (
                of_blocks,
                self._entries[i],
                self._blocks[i],
                places[i],
                amaxes[i].parts.view(-1)[amaxes[i].first :],
            )
            for i, of_blocks in enumerate(maxima)
        ]
        stats_kernel[(min(_PROGRAMS, max(1, -(-entries // _CHUNK))),)](
            *sides[0],
            *sides[1],
            target.own_amax.view(torch.int32),
            target.counts,
            target.counts.stride(0),
            ROW=self._configs[0],
            ROW_PARTS=amaxes[0].count,
            COLUMN=self._configs[1],
            COLUMN_PARTS=amaxes[1].count,
            CHUNK=_CHUNK,
            num_warps=8,
        )


def _number_of_blocks(shape: tuple[int, int], request: OperandRequest) -> int:
    size = request.spec.block_size
    assert size is not None
    length = rounded_up(shape[request.axis], max(16, request.spec.rht))
    return -(-shape[1 - request.axis] // size[0]) * -(-length // size[1])
