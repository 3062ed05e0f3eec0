"""A run planned for many clusters, precisions and sequence lengths: what the page of a plan chooses from.

The page computes nothing but the cost, from hours, energy and two prices: everything else is looked up here.
"""

from dataclasses import dataclass, replace
from typing import Any

from fourbits.plan.assumptions import assumptions
from fourbits.plan.estimate import COMPARED, Estimate, Prices, estimate, plan_run
from fourbits.plan.gpus import Gpu
from fourbits.plan.machine import Machine
from fourbits.plan.plain import plain_estimate
from fourbits.plan.rates import DECLARED, Rates
from fourbits.plan.search import usable_ranks
from fourbits.plan.software import FOURBITS
from fourbits.recipe.presets import get_recipe
from fourbits.train.config import RunConfig
from fourbits.train.preset_figures import with_expected_vocabulary

#: powers of two up to this many GPUs, each lowered to a number that shares a step's sequences
MOST_GPUS = 4096
#: sequence lengths: this many, halved from the run's own
_LENGTHS = 3
_SHORTEST = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Plans by "RECIPE/LENGTH/GPUS"; None where nothing fits. start: the key that the page shows first."""

    gpus: tuple[int, ...]
    lengths: tuple[int, ...]
    recipes: tuple[str, ...]
    cells: dict[str, dict[str, Any] | None]
    start: str
    assumptions: list[str]


def grid(config: RunConfig, gpu: Gpu, gpus: int, rates: Rates = DECLARED) -> Grid:
    """Plan a run for every choice. gpus: the number to start with. Raises ValueError if that does not fit."""
    config = with_expected_vocabulary(config)
    plan = plan_run(config, gpu, gpus, rates, claims=False)
    machine = Machine(gpu, rates, FOURBITS)
    recipes = tuple(dict.fromkeys((*COMPARED, config.recipe.name)))
    lengths, counts = lengths_of(config), gpu_counts(config, gpus)
    cells: dict[str, dict[str, Any] | None] = {}
    for name in recipes:
        recipe = config.recipe if name == config.recipe.name else get_recipe(name)
        for length in lengths:
            run = with_length(replace(config, recipe=recipe), length)
            for count in counts:
                cells[f"{name}/{length}/{count}"] = _cell(run, machine, count)
    start = f"{config.recipe.name}/{config.train.seq_len}/{plan.estimate.choice.layout.gpus}"
    return Grid(
        gpus=counts,
        lengths=lengths,
        recipes=recipes,
        cells=cells,
        start=start,
        assumptions=assumptions(plan),
    )


def lengths_of(config: RunConfig) -> tuple[int, ...]:
    """The run's sequence length and halves of it."""
    own = config.train.seq_len
    halves = [own >> power for power in range(_LENGTHS)]
    return tuple(sorted({own, *(length for length in halves if length >= _SHORTEST)}))


def gpu_counts(config: RunConfig, gpus: int) -> tuple[int, ...]:
    """Numbers of GPUs that share the run's sequences equally, about a factor of two apart, and `gpus`."""
    samples = config.train.samples_per_step
    powers = [1 << power for power in range(MOST_GPUS.bit_length()) if 1 << power <= MOST_GPUS]
    return tuple(sorted({usable_ranks(samples, count) for count in (*powers, gpus)}))


def with_length(config: RunConfig, length: int) -> RunConfig:
    """The run with sequences of another length and as many tokens per step, in micro-batches of one."""
    samples = config.train.tokens_per_step // length
    train = replace(config.train, seq_len=length, micro_batch_size=1, gradient_accumulation=samples)
    return replace(config, train=train)


def _cell(config: RunConfig, machine: Machine, gpus: int) -> dict[str, Any] | None:
    try:
        found: Estimate = estimate(config, machine, gpus)
    except ValueError:
        return None
    layout, step = found.choice.layout, found.choice.step
    text = f"{layout.replicate} x {layout.shard}, micro-batch {layout.micro_batch}, recomputation "
    text += layout.recompute + (f", tensor parallelism {layout.tensor}" if layout.tensor > 1 else "")
    return {
        **{k: v for k, v in plain_estimate(found, Prices()).items() if k not in ("layout", "recipe", "cost")},
        "per_gpu": found.per_gpu,
        "layout": text,
        "used": layout.gpus,
        "memory": [[part, size] for part, size in found.choice.memory.parts.items() if size],
        "step": [[part, step.parts[part]] for part in sorted(step.parts, key=lambda part: -step.parts[part])],
    }
