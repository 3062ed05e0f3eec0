"""Whole training steps of a full-size model: tokens/s by recipe, utilization, memory, time by layer.

A step is that of `fourbits train` with the preset, on random tokens. Recipes run one after another, because
two of these models do not fit on one GPU; the BF16 GEMM rate measured with each shows whether the GPU's clock
rate changed. Utilization (MFU) is the model's FLOPs (counts.py: the causal half of attention, no
recomputation) over the GPU's dense BF16 peak, whatever the recipe.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from fourbits.bench.peers.model import PEERS, PeerRun, bench_peer
from fourbits.bench.steps.layer_times import LayerTimes, layer_times
from fourbits.bench.steps.model_results import BASE, PACKED, ModelRun, model_results
from fourbits.bench.steps.saved_bytes import MemoryBreakdown, SavedBytes, memory_breakdown, saved_bytes
from fourbits.bench.steps.training_step import TrainingStep
from fourbits.bench.timing import (
    Measurements,
    copy_bandwidth,
    measured,
    medians,
    product_rate,
    release_memory,
)
from fourbits.device import peak_flops, probe
from fourbits.linear.convert import convert
from fourbits.model.counts import count_parameters, linear_flops, training_flops
from fourbits.model.lm import LanguageModel
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe
from fourbits.train.config import RunConfig, load_config
from fourbits.train.presets import RUN_PRESETS
from fourbits.train.trainer import compile_model, recompute

RECIPES = (BASE, "nvfp4", "nvfp4" + PACKED)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest:
    """The steps to measure. None: as in the preset, but at most two micro-batches per step.

    peers: names from peers.model.PEERS. profile: run one step under the profiler, on a GPU.
    """

    preset: str
    recipes: tuple[str, ...] = RECIPES
    seq_len: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    compile: Literal["none", "regions", "model"] | None = None
    repeats: int = 5
    peers: tuple[str, ...] = ()
    profile: bool = True

    def config(self) -> RunConfig:
        """The run to measure. Raises ValueError for an unknown preset and for sizes out of range."""
        config = load_config(self.preset, RUN_PRESETS)
        train = config.train
        if self.repeats < 1:
            raise ValueError(
                f"repeats must be at least 1, got {self.repeats}. Omit --repeats for its default, 5."
            )
        default = {"gradient_accumulation": min(train.gradient_accumulation, 2)}
        requested = {
            "seq_len": self.seq_len,
            "micro_batch_size": self.micro_batch,
            "gradient_accumulation": self.accumulation,
            "compile": self.compile,
        }
        given = {name: value for name, value in requested.items() if value is not None}
        return replace(config, train=replace(train, **(default | given)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMeasurements(Measurements):
    """The results, and all measurements of recipes and peers."""

    preset: str
    tokens_per_micro_batch: tuple[int, int]
    micro_batches: int
    parameters: int
    runs: tuple[ModelRun, ...]
    peers: tuple[PeerRun, ...]


def bench_model(
    device: torch.device, request: ModelRequest, log: Callable[[str], None] = lambda line: None
) -> ModelMeasurements:
    """Measure. log: receives a line per result. Raises ValueError for unknown names.

    Ctrl-C ends the benchmark with the results so far, if at least one recipe was measured.
    """
    config, recipes = request.config(), [_recipe(name) for name in request.recipes]
    for name in request.peers:
        if name not in PEERS:
            raise ValueError(
                f"--peers: must be one of {', '.join(PEERS)}, got {name!r}. Pass one or more of these."
            )
    rates = copy_bandwidth(device), product_rate(device)
    runs: list[ModelRun] = []
    peers: list[PeerRun] = []
    try:
        _measure_recipes(runs, device, config, recipes, request, log)
        for name in () if runs and runs[-1].capture_failed else request.peers:
            peers.append(bench_peer(name, config, device, request.repeats))
            log(_line(name, peers[-1].tokens_per_second, peers[-1].peak, peers[-1].absent))
    except KeyboardInterrupt:
        if not runs:
            raise
        log("Stopped: the results until now follow.")
    results = model_results(request.preset, runs, peers)
    common = measured("model", device, results, rates)
    return ModelMeasurements(
        **{name: getattr(common, name) for name in Measurements.__dataclass_fields__},
        preset=request.preset,
        tokens_per_micro_batch=(config.train.micro_batch_size, config.train.seq_len),
        micro_batches=config.train.gradient_accumulation,
        parameters=sum(count_parameters(config.model).values()),
        runs=tuple(runs),
        peers=tuple(peers),
    )


def _measure_recipes(
    runs: list[ModelRun],
    device: torch.device,
    config: RunConfig,
    recipes: list[Recipe],
    request: ModelRequest,
    log: Callable[[str], None],
) -> None:
    """Append each run. Stops after a failed capture."""
    if not recipes:
        return
    model = LanguageModel(config.model, seed=0).to(device)
    recompute(model, config.train.activation_checkpointing)
    compile_model(model, config.train.compile)
    for name, recipe in zip(request.recipes, recipes, strict=True):
        runs.append(_run(model, name, recipe, config, request))
        share = "" if runs[-1].mfu is None else f", MFU {runs[-1].mfu:.1%}"
        log(_line(name, runs[-1].tokens_per_second, runs[-1].memory.peak, None) + share)
        if runs[-1].capture_failed:
            log(f"{name}: {runs[-1].eager_because}. Nothing is measured after it.")
            return


def _line(name: str, rate: float | None, peak: int | None, absent: str | None) -> str:
    memory = "" if peak is None else f", peak {peak / (1 << 30):.1f} GiB"
    return f"{name}: {absent}" if rate is None else f"{name}: {rate:,.0f} tokens/s{memory}"


def _run(
    model: LanguageModel, name: str, recipe: Recipe, config: RunConfig, request: ModelRequest
) -> ModelRun:
    """Measure kernel by kernel, then from CUDA graphs; not interleaved, because each needs all memory."""
    summary = convert(model, recipe)
    step = TrainingStep(model, config)
    device = step.device
    step.one_micro_batch()
    saved = saved_bytes(step)
    layers = layer_times(step) if device.type == "cuda" and request.profile else None
    times = _times(step, saved, request)
    del step
    if not times.failed:
        release_memory(device)
    flops = training_flops(config.model, config.train.seq_len)
    rate = config.train.tokens_per_step / times.seconds
    peak = peak_flops(probe(device), torch.bfloat16)
    tokens = config.train.micro_batch_size * config.train.seq_len
    return ModelRun(
        recipe=name,
        seconds=times.seconds,
        eager_seconds=times.eager_seconds,
        tokens_per_second=rate,
        flops=flops,
        mfu=None if peak is None else utilization(rate * sum(flops.values()), peak),
        memory=times.memory,
        saved=saved,
        quantized=tuple(row.name for row in summary.rows if row.quantized),
        product_rate=times.product_rate,
        eager_because=times.eager_because,
        capture_failed=times.failed,
        layers=layers,
        layer_mfu={} if layers is None or peak is None else _layer_mfu(layers, config, tokens, peak),
    )


@dataclass(frozen=True, slots=True)
class _Times:
    """Times of a step, see ModelRun. failed: eager_because describes a failed capture."""

    seconds: float
    eager_seconds: float
    memory: MemoryBreakdown
    product_rate: float
    eager_because: str | None
    failed: bool = False


def _times(step: TrainingStep, saved: SavedBytes, request: ModelRequest) -> _Times:
    device, rate = step.device, product_rate(step.device)
    release_memory(device)
    eager = _seconds(step.kernel_by_kernel, device, request)
    memory = memory_breakdown(step, saved)
    if step.eager_because is not None:
        return _Times(eager, eager, memory, rate, step.eager_because)
    release_memory(device)
    try:
        return _Times(_seconds(step, device, request), eager, memory_breakdown(step, saved), rate, None)
    except RuntimeError as error:
        # Any error: the eager steps were measured, and the results say that they are eager.
        return _Times(eager, eager, memory, rate, f"the capture failed: {str(error).splitlines()[0]}", True)


def _seconds(step: Callable[[], object], device: torch.device, request: ModelRequest) -> float:
    """Median time of a step. The first captured step runs kernel by kernel, and the second one captures."""
    (seconds,) = medians([step], device, request.repeats, warm_up=2)
    return seconds


def utilization(flops_per_second: float, peak: float) -> float:
    """The share of the peak. It must be at most 1, else the FLOP counts or the peak are wrong."""
    share = flops_per_second / peak
    assert share <= 1, f"{flops_per_second / 1e12:.0f} TFLOP/s counted, of a peak of {peak / 1e12:.0f}"
    return share


def _layer_mfu(layers: LayerTimes, config: RunConfig, tokens: int, peak: float) -> dict[str, float]:
    """Utilization while a type of layer runs, including its quantization and elementwise work.

    Above 1, kernels of its backward pass were not attributed to it; the value is shown unchanged.
    """
    flops = linear_flops(config.model) | training_flops(config.model, config.train.seq_len)
    flops["scan"] += flops.pop("conv")
    return {
        kind: flops[kind] * tokens / seconds / peak
        for kind, seconds in layers.seconds.items()
        if flops.get(kind) and seconds
    }


def _recipe(name: str) -> Recipe:
    if name.endswith(PACKED):
        return replace(get_recipe(name.removesuffix(PACKED)), saved_inputs="packed")
    return get_recipe(name)
