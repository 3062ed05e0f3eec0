"""Tile sizes and split-K, chosen by a model of the GPU.

They are not timed when a run starts: the order of FP32 additions, and so the last bits of a run, must not
depend on the load of the GPU at that moment.
"""

import functools
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """A tile of the output, its step along K, pipeline stages and warps."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    #: microseconds per step, and for the rest, of all tiles that an SM runs together, measured on Hopper
    #: GPUs; only ratios matter
    step_time: float
    rest_time: float
    #: step_time if the left operand is contracted along its rows, as in Wgrad
    columns_time: float
    #: programs that share an SM; one multiplies while another writes
    programs: int = 1


class GpuModel(NamedTuple):
    """The GPU properties that tiles depend on."""

    sms: int
    tma: bool
    tiles: tuple[Tile, ...]


class Work(NamedTuple):
    """The division of a GEMM into tiles and split-K parts."""

    tile: Tile
    split_k: int


_LARGE_MEMORY = (
    Tile(128, 256, 64, 4, 8, 0.60, 1.5, 0.62),
    Tile(128, 128, 64, 4, 8, 0.37, 0.65, 0.51),
    Tile(64, 128, 64, 4, 4, 0.31, 0.5, 0.40),
    Tile(128, 128, 64, 3, 4, 0.67, 1.2, 0.85, programs=2),
)
#: sm_100 accumulates in tensor memory and stages the output in addition to the operands
_TENSOR_MEMORY = tuple(tile._replace(stages=3) for tile in _LARGE_MEMORY if tile.programs == 1)
_SMALL_MEMORY = (Tile(128, 128, 32, 3, 8, 0.19, 1.4, 0.19), Tile(64, 64, 32, 3, 4, 0.12, 1.0, 0.12))
_INTERPRETED = GpuModel(8, True, (Tile(32, 32, 32, 1, 4, 1.0, 0.0, 1.0),))
_SPLITS = tuple(range(1, 9))
#: launch time in microseconds of the kernel that adds split-K sums, and its bytes per microsecond
_SUM_START, _SUM_RATE = 4.0, 2e6


@functools.cache
def gpu_model(device: torch.device) -> GpuModel:
    """The GPU's tiles: shared memory of 227 KiB (sm_90, sm_100) or of about 99 KiB (sm_80, sm_120)."""
    if device.type != "cuda":
        return _INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    tiles = _TENSOR_MEMORY if properties.major == 10 else _LARGE_MEMORY
    if properties.shared_memory_per_block_optin < 220 << 10:
        tiles = _SMALL_MEMORY
    return GpuModel(properties.multi_processor_count, properties.major >= 9, tiles)


@functools.lru_cache(maxsize=4096)
def best_work(
    gpu: GpuModel, M: int, N: int, K: int, columns: bool, splits: tuple[int, ...] = _SPLITS
) -> Work:
    """The fastest division: waves times the time of a tile, plus adding the split-K sums.

    columns: whether the left operand is contracted along its rows.
    """

    def time(work: Work) -> float:
        tile = work.tile
        step_time = tile.columns_time if columns else tile.step_time
        programs = ceil_div(M, tile.m) * ceil_div(N, tile.n) * work.split_k
        waves = ceil_div(programs, gpu.sms * tile.programs)
        steps = ceil_div(ceil_div(K, tile.k), work.split_k)
        adding = 0.0 if work.split_k == 1 else _SUM_START + 8.0 * work.split_k * M * N / _SUM_RATE
        return waves * (steps * step_time + tile.rest_time) + adding

    return min((Work(tile, count) for tile in gpu.tiles for count in splits), key=time)


def grouped_tile(gpu: GpuModel, rows: int, columns: int, groups: int) -> Tile:
    """The tile of a GEMM of groups of rows, by the average rows per group; the host does not know the sizes.

    A tile of 128 rows is half empty in groups of 64 rows, which then take as long as in a tile of 64 rows.
    """
    few = rows <= 64 * groups
    fitting = [tile for tile in gpu.tiles if tile.n <= max(128, columns) and (tile.m <= 64 or not few)]
    return (fitting or list(gpu.tiles))[0]


def sums_tile(gpu: GpuModel) -> Tile:
    """The tile of the GEMM that contracts a group's rows: two programs per SM, because sums are short and
    writing their FP32 tiles takes as long.
    """
    tile = next((tile for tile in gpu.tiles if (tile.m, tile.n) == (128, 128)), gpu.tiles[0])
    return tile._replace(stages=min(tile.stages, 3))


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
