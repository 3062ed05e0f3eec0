"""Compares training steps of several ranks with the same steps of one, with equal micro-batches per rank.

Ranks that share layers (parallel.tensor) together have the micro-batches of one rank. First all ranks train
independently at the same time, then together. Both run kernel by kernel, as several ranks do
(docs/decisions.md, S 3), with everything but the linear layers compiled. Tokens and weights are random. A
GPU's clock rate falls with its temperature, so the order favours the independent steps, if any.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from fourbits.bench.ranks.collectives import Traffic, traffic_of
from fourbits.bench.steps.training_step import TrainingStep
from fourbits.bench.timing import (
    Measurements,
    Result,
    copy_bandwidth,
    measured,
    medians,
    product_rate,
    release_memory,
)
from fourbits.linear.convert import convert
from fourbits.model.config import ModelConfig
from fourbits.model.counts import count_parameters
from fourbits.model.init import initial_value
from fourbits.model.lm import LanguageModel
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe
from fourbits.train.config import RunConfig, load_config
from fourbits.train.parallel import Reshard
from fourbits.train.presets import RUN_PRESETS
from fourbits.train.ranks.ranks import Ranks
from fourbits.train.trainer import compile_model, recompute

#: goal: speed relative to as many independent ranks
GOAL = 0.93
#: larger parameters get random weights that are cheap to draw, on the device
_LARGE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksRequest:
    """The steps to measure. None: as in the preset; of micro-batches per rank and step, at most two."""

    preset: str
    recipes: tuple[str, ...] = ("bf16", "nvfp4")
    seq_len: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    compile: Literal["none", "regions", "model"] | None = None
    gradients: Literal["fp32", "bf16"] | None = None
    gather: Literal["packed", "masters"] | None = None
    reshard: Reshard | None = None
    tensor: int | None = None
    repeats: int = 5

    def config(self) -> RunConfig:
        """The run to measure, with one rank's micro-batches. Raises ValueError for unknown names."""
        config = load_config(self.preset, RUN_PRESETS)
        if self.repeats < 1:
            raise ValueError(
                f"repeats must be at least 1, got {self.repeats}. Omit --repeats for its default, 5."
            )
        requested = {
            "seq_len": self.seq_len,
            "micro_batch_size": self.micro_batch,
            "gradient_accumulation": self.accumulation or min(config.train.gradient_accumulation, 2),
            "compile": self.compile,
        }
        given = {name: value for name, value in requested.items() if value is not None}
        names = ("gradients", "gather", "reshard", "tensor")
        shared = {name: getattr(self, name) for name in names}
        shared = {name: value for name, value in shared.items() if value is not None}
        train = replace(config.train, cuda_graph=False, **given)  # several ranks do not use CUDA graphs
        parallel = replace(config.parallel, **shared)
        return replace(config, train=train, parallel=parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRun:
    """A recipe's steps. Rates are sums over ranks; times and memory those of the slowest and the largest.

    traffic: what one rank sends in a step, by kind of collective.
    """

    recipe: str
    seconds_alone: float
    seconds: float
    tokens_per_second_alone: float
    tokens_per_second: float
    peak_alone: int | None
    peak: int | None
    traffic: dict[str, Traffic]
    #: the form in which weights are gathered, as text
    gather: tuple[str, ...]

    @property
    def efficiency(self) -> float:
        """Speed relative to as many ranks that train independently."""
        return self.tokens_per_second / self.tokens_per_second_alone


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksMeasurements(Measurements):
    """The results, and all measurements of each recipe."""

    preset: str
    ranks: int
    tokens_per_micro_batch: tuple[int, int]
    #: per rank and step
    micro_batches: int
    parameters: int
    #: ranks that share layers
    tensor: int
    runs: tuple[RanksRun, ...]


def bench_ranks(
    ranks: Ranks, request: RanksRequest, log: Callable[[str], None] = lambda line: None
) -> RanksMeasurements:
    """Measure; all ranks must call it. log: receives a line per recipe.

    Raises ValueError for unknown names, and for a process that no launcher started.
    """
    if ranks.alone:
        raise ValueError(
            "bench ranks: needs the processes of a launcher. Start it with torchrun --nproc-per-node 2 -m "
            "fourbits bench ranks."
        )
    config, recipes = request.config(), [get_recipe(name) for name in request.recipes]
    rates = copy_bandwidth(ranks.device), product_rate(ranks.device)
    runs: list[RanksRun] = []
    for name, recipe in zip(request.recipes, recipes, strict=True):
        runs.append(_run(ranks, name, recipe, config, request.repeats))
        log(describe(runs[-1]))
    results = tuple(_result(run) for run in runs)
    common = measured("ranks", ranks.device, results, rates)
    return RanksMeasurements(
        **{name: getattr(common, name) for name in Measurements.__dataclass_fields__},
        preset=request.preset,
        ranks=ranks.world,
        tokens_per_micro_batch=(config.train.micro_batch_size, config.train.seq_len),
        micro_batches=config.train.gradient_accumulation,
        parameters=sum(count_parameters(config.model).values()),
        tensor=config.parallel.tensor,
        runs=tuple(runs),
    )


def describe(run: RanksRun) -> str:
    """A line about a recipe's steps."""
    moved = ", ".join(f"{kind} {found.moved / 1e6:,.1f} MB" for kind, found in run.traffic.items())
    return (
        f"{run.recipe}: {run.tokens_per_second:,.0f} tokens/s, efficiency {run.efficiency:.3f}, "
        f"step {run.seconds * 1e3:,.1f} ms (alone {run.seconds_alone * 1e3:,.1f}); sent per rank: {moved}"
    )


def _run(ranks: Ranks, name: str, recipe: Recipe, config: RunConfig, repeats: int) -> RanksRun:
    release_memory(ranks.device)
    single = _median(_step(Ranks(ranks.device), recipe, config), repeats)
    peak_alone = _peak(ranks.device)
    release_memory(ranks.device)
    step = _step(ranks, recipe, config)
    together = _median(step, repeats)
    peak = _peak(ranks.device)
    traffic = traffic_of(step.kernel_by_kernel, ranks.device)
    del step
    release_memory(ranks.device)
    own = [single, together, peak_alone or 0, peak or 0]
    found = ranks.all(torch.tensor(own, dtype=torch.float64, device=ranks.device))
    tokens = config.train.tokens_per_step
    singles, slowest = found[:, 0], float(found[:, 1].max())
    return RanksRun(
        recipe=name,
        seconds_alone=float(singles.max()),
        seconds=slowest,
        tokens_per_second_alone=float((tokens / singles).sum()),
        tokens_per_second=ranks.data_ranks * tokens / slowest,
        peak_alone=None if peak_alone is None else int(found[:, 2].max()),
        peak=None if peak is None else int(found[:, 3].max()),
        traffic=traffic,
        gather=tuple(ranks.notes()),
    )


def _step(ranks: Ranks, recipe: Recipe, config: RunConfig) -> TrainingStep:
    """A step of one rank among `ranks`, on random weights."""
    with torch.device("meta"):
        model = LanguageModel(config.model, seed=0)
    recompute(model, config.train.activation_checkpointing)
    convert(model, recipe)
    compile_model(model, config.train.compile)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    masters = ranks.empty_masters(model)
    _draw(ranks, model.config, shapes, masters)
    return TrainingStep(model, config, ranks, masters)


@torch.no_grad()
def _draw(
    ranks: Ranks, config: ModelConfig, shapes: Mapping[str, torch.Size], masters: dict[str, nn.Parameter]
) -> None:
    """Initialize weights: as in training if they are few, else with random numbers of that range."""
    for name, shape in shapes.items():
        if shape.numel() > _LARGE:
            masters[name].normal_(std=config.init_std)
        else:
            value = initial_value(name, shape, config, 0)
            masters[name].copy_(ranks.own_part(name, value))


def _median(step: TrainingStep, repeats: int) -> float:
    """Median seconds of a step. The first ones compile, and fill the allocator."""
    (seconds,) = medians([step.kernel_by_kernel], step.device, repeats, warm_up=2)
    return seconds


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _result(run: RanksRun) -> Result:
    return Result(
        name=run.recipe, seconds=run.seconds, value=run.efficiency, unit="of as many alone", goal=GOAL
    )
