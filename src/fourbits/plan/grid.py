"""Plans of a run for many clusters, precisions and sequence lengths, which the page of a plan offers."""

from dataclasses import dataclass, replace

from fourbits.plan.estimate import (
    COMPARED,
    Alternative,
    Estimate,
    Plan,
    alternatives_of,
    estimate,
    failures_for,
    plan_run,
)
from fourbits.plan.failures import Failures
from fourbits.plan.gpus import Gpu
from fourbits.plan.machine import Machine
from fourbits.plan.rates import DECLARED, Rates
from fourbits.plan.search import DoesNotFitError, usable_ranks
from fourbits.plan.software import FOURBITS
from fourbits.recipe.presets import get_recipe
from fourbits.train.config import RunConfig

#: powers of two up to this many GPUs, each lowered to a number that divides a step's sequences
MOST_GPUS = 4096
#: sequence lengths: this many, halved from the run's own
_LENGTHS = 3
_SHORTEST = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The plan of one choice."""

    config: RunConfig
    estimate: Estimate
    failures: Failures
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Plans by (recipe, length, GPUs); None where nothing fits. plan: of the run as it was given."""

    plan: Plan
    gpus: tuple[int, ...]
    lengths: tuple[int, ...]
    recipes: tuple[str, ...]
    cells: dict[tuple[str, int, int], Cell | None]


def grid(config: RunConfig, gpu: Gpu, gpus: int, rates: Rates = DECLARED) -> Grid:
    """Plan a run for every choice. gpus: the number to start with. Raises DoesNotFitError for that one."""
    plan = plan_run(config, gpu, gpus, rates)
    config, machine = plan.config, Machine(gpu, rates, FOURBITS)
    recipes = tuple(dict.fromkeys((*COMPARED, config.recipe.name)))
    lengths, counts = lengths_of(config), gpu_counts(config, gpus)
    cells: dict[tuple[str, int, int], Cell | None] = {}
    for name in recipes:
        recipe = config.recipe if name == config.recipe.name else get_recipe(name)
        for length in lengths:
            run = with_length(replace(config, recipe=recipe), length)
            for count in counts:
                cells[name, length, count] = _cell(run, machine, count)
    return Grid(plan=plan, gpus=counts, lengths=lengths, recipes=recipes, cells=cells)


def lengths_of(config: RunConfig) -> tuple[int, ...]:
    """The run's sequence length and halves of it."""
    own = config.train.seq_len
    halves = [own >> power for power in range(_LENGTHS)]
    return tuple(sorted({own, *(length for length in halves if length >= _SHORTEST)}))


def gpu_counts(config: RunConfig, gpus: int) -> tuple[int, ...]:
    """Numbers of GPUs that share the run's sequences equally, about a factor of two apart, and `gpus`."""
    samples = config.train.samples_per_step
    powers = [1 << power for power in range(MOST_GPUS.bit_length()) if 1 << power <= MOST_GPUS]
    return tuple(sorted({*(usable_ranks(samples, count) for count in powers), gpus}))


def with_length(config: RunConfig, length: int) -> RunConfig:
    """The run with sequences of another length and as many tokens per step, in micro-batches of one."""
    samples = config.train.tokens_per_step // length
    train = replace(config.train, seq_len=length, micro_batch_size=1, gradient_accumulation=samples)
    return replace(config, train=train)


def _cell(config: RunConfig, machine: Machine, gpus: int) -> Cell | None:
    try:
        found = estimate(config, machine, gpus)
    except DoesNotFitError:
        return None
    return Cell(
        config=config,
        estimate=found,
        failures=failures_for(config, found),
        alternatives=alternatives_of(config, machine, found.choice.layout),
    )
