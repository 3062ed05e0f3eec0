"""The tables of `fourbits bench`: results, and for a model its runs, memory, time by layer, and peers."""

from collections.abc import Iterator

from rich.table import Table

from fourbits.bench.ranks.measure import RanksMeasurements
from fourbits.bench.steps.model import ModelMeasurements
from fourbits.bench.steps.model_results import ModelRun
from fourbits.bench.steps.saved_bytes import MemoryBreakdown
from fourbits.bench.timing import Measurements

_GIB = 1 << 30
_KERNELS_SHOWN = 25


def result_table(measured: Measurements) -> Table:
    """A row per result, with its goal and ceiling."""
    copy, gemm = measured.copy_bandwidth / 1e9, measured.product_rate / 1e12
    rates = f"copy {copy:,.1f} GB/s, BF16 GEMM {gemm:,.2f} TFLOP/s"
    title = f"{measured.benchmark}: {measured.device}, torch {measured.torch}; {rates}"
    hosts = any(result.host_seconds is not None for result in measured.results)
    columns = ("result", "median ms", *(("host ms",) if hosts else ()), "value", "goal", "ceiling")
    table = Table(*columns, title=title, title_justify="left")
    for result in measured.results:
        goal, ceiling = (f"{x:.2f}" if x is not None else "" for x in (result.goal, result.ceiling))
        host = "" if result.host_seconds is None else f"{result.host_seconds * 1e3:,.3f}"
        times = (f"{result.seconds * 1e3:,.3f}", *((host,) if hosts else ()))
        table.add_row(result.name, *times, f"{result.value:.2f} {result.unit}", goal, ceiling)
    return table


def model_tables(measured: ModelMeasurements) -> Iterator[Table]:
    """Further tables of the model benchmark."""
    yield _runs(measured)
    yield _memory(measured)
    for run in measured.runs:
        if run.layers is not None:
            yield _layers(run)
            yield _kernels(run)
    if measured.peers:
        yield _peers(measured)


def ranks_table(measured: RanksMeasurements) -> Table:
    """Steps of several ranks: speed, memory, and what a rank sends in a step."""
    batch, length = measured.tokens_per_micro_batch
    size = f"{measured.parameters / 1e6:,.1f}M parameters, {measured.ranks} ranks"
    size += f", {measured.tensor} of which share layers" if measured.tensor > 1 else ""
    title = f"{measured.preset}: {size}, {measured.micro_batches} x {batch} x {length} tokens each per step"
    columns = ("recipe", "tokens/s", "efficiency", "step ms", "alone ms", "peak GiB", "alone GiB")
    table = Table(*columns, "gathered MB", "reduced MB", title=title, title_justify="left")
    for run in measured.runs:
        table.add_row(
            run.recipe,
            f"{run.tokens_per_second:,.0f}",
            f"{run.efficiency:.3f}",
            f"{run.seconds * 1e3:,.1f}",
            f"{run.seconds_alone * 1e3:,.1f}",
            _gib(run.peak),
            _gib(run.peak_alone),
            *(f"{run.traffic[kind].moved / 1e6:,.1f}" for kind in ("all_gather", "reduce_scatter")),
        )
    return table


def _runs(measured: ModelMeasurements) -> Table:
    batch, length = measured.tokens_per_micro_batch
    size = (
        f"{measured.parameters / 1e6:,.1f}M parameters, {measured.micro_batches} x {batch} x {length} tokens"
    )
    columns = ("recipe", "tokens/s", "step ms", "eager step ms", "MFU", "GEMM TFLOP/s", "micro-batches")
    table = Table(*columns, title=f"{measured.preset}: {size} per step")
    for run in measured.runs:
        table.add_row(
            run.recipe,
            f"{run.tokens_per_second:,.0f}",
            f"{run.seconds * 1e3:,.1f}",
            f"{run.eager_seconds * 1e3:,.1f}",
            "unknown" if run.mfu is None else f"{run.mfu:.1%}",
            f"{run.product_rate / 1e12:,.0f}",
            run.eager_because or "replayed from CUDA graphs",
        )
    return table


def _memory(measured: ModelMeasurements) -> Table:
    table = Table("GiB", *(run.recipe for run in measured.runs), title="memory per step")
    for name in MemoryBreakdown.__dataclass_fields__:
        table.add_row(name.replace("_", " "), *(_gib(getattr(run.memory, name)) for run in measured.runs))
    return table


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / _GIB:.2f}"


def _layers(run: ModelRun) -> Table:
    assert run.layers is not None
    title = (
        f"{run.recipe}: kernels of one micro-batch and one optimizer step, {run.layers.total * 1e3:,.1f} ms"
    )
    table = Table("layer type", "ms", "share", "MFU while running", title=title)
    for kind, seconds in run.layers.seconds.items():
        mfu = f"{run.layer_mfu[kind]:.1%}" if kind in run.layer_mfu else ""
        table.add_row(kind, f"{seconds * 1e3:,.2f}", f"{seconds / run.layers.total:.1%}", mfu)
    return table


def _kernels(run: ModelRun) -> Table:
    assert run.layers is not None
    table = Table("kernel", "ms", "calls", title=f"{run.recipe}: slowest kernels")
    for name, seconds, calls in run.layers.kernels[:_KERNELS_SHOWN]:
        table.add_row(name[:90], f"{seconds * 1e3:,.2f}", f"{calls}")
    return table


def _peers(measured: ModelMeasurements) -> Table:
    table = Table("peer", "measured", "tokens/s", "step ms", "peak GiB", "kernel calls", title="peers")
    for peer in measured.peers:
        if peer.seconds is None or peer.tokens_per_second is None:
            table.add_row(peer.name, peer.what, peer.absent)
            continue
        calls = "" if peer.kernel_calls is None else f"{peer.kernel_calls}"
        rate = f"{peer.tokens_per_second:,.0f}"
        table.add_row(peer.name, peer.what, rate, f"{peer.seconds * 1e3:,.1f}", _gib(peer.peak), calls)
    return table
