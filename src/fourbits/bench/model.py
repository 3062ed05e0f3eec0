"""Whole training steps of a model at its size: tokens/s by recipe, utilization, memory, and where time goes.

A step is the preset's, as `fourbits train` makes it, on random tokens. Recipes run one after another, because
two of these models do not fit on a card; the rate of a BF16 product beside each shows whether the card's
clock stayed. Utilization (MFU) is the model's own FLOPs (counts.py: the causal half of attention, nothing
computed twice) over the card's dense BF16 peak, whatever the recipe.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from fourbits.bench.layer_times import LayerTimes, layer_times
from fourbits.bench.model_peers import PEERS, PeerRun, bench_peer
from fourbits.bench.saved_bytes import MemoryBreakdown, SavedBytes, memory_breakdown, saved_bytes
from fourbits.bench.timing import Bar, Report, copy_bandwidth, measured, medians, product_rate
from fourbits.bench.training_step import TrainingStep, release
from fourbits.device import peak_flops, probe
from fourbits.model.counts import linear_flops, training_flops
from fourbits.model.lm import LanguageModel
from fourbits.recipe.convert import convert
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe
from fourbits.train.config import RunConfig, load_config
from fourbits.train.presets import RUN_PRESETS
from fourbits.train.trainer import compile_model

#: what `--recipes` may say behind a recipe's name: inputs are saved in codes and scales
PACKED = ":packed"
RECIPES = ("bf16", "nvfp4", "nvfp4" + PACKED)
_BASE = "bf16"
#: at the sizes that the goals are for: of BF16's tokens/s, and bytes of saved inputs over BF16's
_GOAL_PRESETS, _GOAL, _GOAL_MFU = ("transformer-1.2b", "hybrid-1.2b"), 0.90, (0.50, 0.45)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest:
    """What to measure. None: as the preset says, but at most two micro-batches a step.

    peers: names of model_peers.PEERS. profile: run one step under the profiler, on a card.
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
        """The run that is measured. Raises ValueError for an unknown preset and for sizes out of range."""
        config = load_config(self.preset, RUN_PRESETS)
        train = config.train
        sizes = {
            "seq_len": self.seq_len or train.seq_len,
            "micro_batch_size": self.micro_batch or train.micro_batch_size,
            "gradient_accumulation": self.accumulation or min(train.gradient_accumulation, 2),
        }
        return replace(config, train=replace(train, **sizes, compile=self.compile or train.compile))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRun:
    """One recipe's steps. flops: of a token, by kind; mfu: all of them as a share of the card's peak.

    layers, layer_mfu: kernel time by type of layer, and utilization while it runs; on a card only.
    """

    recipe: str
    seconds: float
    tokens_per_second: float
    flops: dict[str, float]
    mfu: float | None
    memory: MemoryBreakdown
    saved: SavedBytes
    quantized: tuple[str, ...]
    product_rate: float
    eager_because: str | None
    layers: LayerTimes | None = None
    layer_mfu: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport(Report):
    """Bars, and everything that was measured of recipes and peers."""

    preset: str
    tokens_per_micro_batch: tuple[int, int]
    micro_batches: int
    parameters: int
    runs: tuple[ModelRun, ...]
    peers: tuple[PeerRun, ...]


def bench_model(
    device: torch.device, request: ModelRequest, say: Callable[[str], None] = lambda line: None
) -> ModelReport:
    """Measure. say: is told each result as it comes. Raises ValueError for names that are not known."""
    config, recipes = request.config(), [_recipe(name) for name in request.recipes]
    for name in request.peers:
        if name not in PEERS:
            raise ValueError(f"--peers: must be of {', '.join(PEERS)}, got {name!r}.")
    rates = copy_bandwidth(device), product_rate(device)
    runs, parameters = _runs(device, config, recipes, request, say)
    peers: list[PeerRun] = []
    for name in request.peers:
        peers.append(bench_peer(name, config, device, request.repeats))
        say(_line(name, peers[-1].tokens_per_second, peers[-1].peak, peers[-1].absent))
    bars = (*_bars(request.preset, runs), *_memory_bars(runs), *_peer_bars(runs, peers))
    report = measured("model", device, bars, rates)
    return ModelReport(
        **{name: getattr(report, name) for name in Report.__dataclass_fields__},
        preset=request.preset,
        tokens_per_micro_batch=(config.train.micro_batch_size, config.train.seq_len),
        micro_batches=config.train.gradient_accumulation,
        parameters=parameters,
        runs=tuple(runs),
        peers=tuple(peers),
    )


def _runs(
    device: torch.device,
    config: RunConfig,
    recipes: list[Recipe],
    request: ModelRequest,
    say: Callable[[str], None],
) -> tuple[list[ModelRun], int]:
    if not recipes:
        return [], 0
    model = LanguageModel(config.model, seed=0).to(device)
    model.recompute_blocks = config.train.activation_checkpointing == "full"
    compile_model(model, config.train.compile)
    runs: list[ModelRun] = []
    for name, recipe in zip(request.recipes, recipes, strict=True):
        runs.append(_run(model, name, recipe, config, request))
        say(_line(name, runs[-1].tokens_per_second, runs[-1].memory.peak, None))
    return runs, sum(p.numel() for p in model.parameters())


def _line(name: str, rate: float | None, peak: int | None, absent: str | None) -> str:
    memory = "" if peak is None else f", peak {peak / (1 << 30):.1f} GiB"
    return f"{name}: {absent}" if rate is None else f"{name}: {rate:,.0f} tokens/s{memory}"


def _run(
    model: LanguageModel, name: str, recipe: Recipe, config: RunConfig, request: ModelRequest
) -> ModelRun:
    """Kernel by kernel first, then from graphs: one after the other, as both need the card's memory."""
    summary = convert(model, recipe)
    step = TrainingStep(model, config)
    step.one_micro_batch()
    saved = saved_bytes(step)
    on_card = step.device.type == "cuda"
    layers = layer_times(step) if on_card and request.profile else None
    release(step.device)
    (seconds,) = medians([step], step.device, request.repeats)
    memory = memory_breakdown(step, saved)
    why = step.eager_because
    device = step.device
    del step
    release(device)
    flops = training_flops(config.model, config.train.seq_len)
    rate = config.train.tokens_per_step / seconds
    peak = peak_flops(probe(device.type), torch.bfloat16)
    tokens = config.train.micro_batch_size * config.train.seq_len
    return ModelRun(
        recipe=name,
        seconds=seconds,
        tokens_per_second=rate,
        flops=flops,
        mfu=None if peak is None else utilization(rate * sum(flops.values()), peak),
        memory=memory,
        saved=saved,
        quantized=tuple(row.name for row in summary.rows if row.quantized),
        product_rate=product_rate(device),
        eager_because=why,
        layers=layers,
        layer_mfu={} if layers is None or peak is None else _layer_mfu(layers, config, tokens, peak),
    )


def utilization(flops_per_second: float, peak: float) -> float:
    """The share of the peak; more than all of it is a mistake in the counts, or in the peak."""
    share = flops_per_second / peak
    assert share <= 1, f"{flops_per_second / 1e12:.0f} TFLOP/s counted, of a peak of {peak / 1e12:.0f}"
    return share


def _layer_mfu(layers: LayerTimes, config: RunConfig, tokens: int, peak: float) -> dict[str, float]:
    """Utilization while a type of layer runs, quantization and all its elementwise work included.

    More than 1 would mean that kernels of its backward pass were not recognized; it is shown as it is.
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


def _base(runs: list[ModelRun]) -> ModelRun | None:
    return next((run for run in runs if run.recipe == _BASE), None)


def _bars(preset: str, runs: list[ModelRun]) -> list[Bar]:
    base, bars = _base(runs), []
    for run in runs:
        goal = _GOAL if preset in _GOAL_PRESETS and run.recipe == "nvfp4" else None
        if base is not None:
            value = base.seconds / run.seconds
            bars.append(Bar(name=run.recipe, seconds=run.seconds, value=value, unit="of BF16", goal=goal))
        if run.mfu is not None:
            at_size = preset in _GOAL_PRESETS and run.recipe == _BASE
            goal = _GOAL_MFU[_GOAL_PRESETS.index(preset)] if at_size else None
            name = f"{run.recipe}, MFU"
            bars.append(Bar(name=name, seconds=run.seconds, value=run.mfu, unit="of peak", goal=goal))
    return bars


def _memory_bars(runs: list[ModelRun]) -> list[Bar]:
    """How many times less memory: BF16's bytes over the recipe's, of saved inputs and at the peak."""
    base, bars = _base(runs), []
    for run in runs:
        packed = run.recipe.endswith(PACKED)
        if base is None or not run.quantized:
            continue
        theirs = sum(base.saved.inputs.get(name, 0) for name in run.quantized)
        ours = sum(run.saved.inputs.get(name, 0) for name in run.quantized)
        shares = {"saved inputs of quantized linears": (theirs / ours, 1 / 0.29)}
        if base.memory.peak and run.memory.peak:
            shares["peak memory"] = (base.memory.peak / run.memory.peak, 1 / 0.87)
        bars += [
            Bar(
                name=f"{run.recipe}, {what}",
                seconds=run.seconds,
                value=value,
                unit="times less",
                goal=goal if packed else None,
            )
            for what, (value, goal) in shares.items()
        ]
    return bars


def _peer_bars(runs: list[ModelRun], peers: list[PeerRun]) -> list[Bar]:
    base = _base(runs)
    if base is None:
        return []
    return [
        Bar(
            name=f"bf16 against {peer.name}",
            seconds=peer.seconds,
            value=base.tokens_per_second / peer.tokens_per_second,
            unit="times its tokens/s",
            goal=peer.goal,
        )
        for peer in peers
        if peer.seconds is not None and peer.tokens_per_second is not None
    ]
