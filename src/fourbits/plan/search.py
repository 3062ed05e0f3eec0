"""The fastest layout of a step on N GPUs that fits their memory."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fourbits.model.config import ModelConfig
from fourbits.plan.layouts import RECOMPUTED, ParallelLayout
from fourbits.plan.linears import LinearGroup
from fourbits.plan.machine import Machine
from fourbits.plan.memory import Memory, memory_of
from fourbits.plan.shards import uneven_layers
from fourbits.plan.step import Step, step_of
from fourbits.train.config import RunConfig

#: ranks of tensor parallelism that are tried where nothing fits without it
_TENSOR = (2, 4, 8)
_MOST_SEQUENCES = 64


class DoesNotFitError(ValueError):
    """No layout fits the memory of the GPUs."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout with its memory and its step."""

    layout: ParallelLayout
    memory: Memory
    step: Step


@dataclass(frozen=True, slots=True)
class SearchProblem:
    """What to find a layout for: a run, its linear layers in its recipe, and the machine."""

    config: RunConfig
    groups: list[LinearGroup]
    machine: Machine

    @property
    def model(self) -> ModelConfig:
        """The configuration of the model."""
        return self.config.model

    @property
    def packed(self) -> "SearchProblem | None":
        """The same with saved inputs as codes; None where the recipe cannot store them so."""
        if not any(group.quantized for group in self.groups):
            return None
        try:
            recipe = replace(self.config.recipe, saved_inputs="packed")
        except ValueError:
            return None
        return replace(self, config=replace(self.config, recipe=recipe))

    @property
    def packs(self) -> bool:
        """Whether saved inputs are codes."""
        return self.config.recipe.saved_inputs == "packed"

    def memory(self, layout: ParallelLayout, packs: bool | None = None) -> Memory:
        """The memory of a layout. packs: in place of the recipe's choice."""
        packs = self.packs if packs is None else packs
        gpu, software = self.machine.gpu, self.machine.software
        return memory_of(self.model, self.groups, packs, self.config.train.seq_len, layout, gpu, software)

    def choice(self, layout: ParallelLayout) -> Choice:
        """A layout with its memory and its step, computed."""
        step = step_of(self.model, self.groups, self.config.train.seq_len, layout, self.machine)
        return Choice(layout, self.memory(layout), step)


def best_layout(problem: SearchProblem, gpus: int) -> Choice:
    """The fastest layout that fits: with gradients added up as the run says, else in shards, else with tensor
    parallelism.

    A step keeps its number of sequences, so it may use fewer GPUs than there are. Raises DoesNotFitError if
    nothing fits.
    """
    smallest = float("inf")
    model, seq_len = problem.model, problem.config.train.seq_len
    even = (t for t in _TENSOR if t <= gpus and not uneven_layers(model, problem.groups, seq_len, t))
    for tensor in (1, *even):
        fitting, least = _fitting(problem, gpus, tensor)
        smallest = min(smallest, least)
        if fitting:
            return min(map(problem.choice, fitting), key=lambda choice: choice.step.seconds)
    limit, gpu = problem.machine.usable_memory, problem.machine.gpu.name
    raise DoesNotFitError(
        f"plan: no layout of {gpus:,} {gpu} fits {problem.config.recipe.name}: the least is "
        f"{smallest / 2**30:,.1f} GiB per GPU, of {limit / 2**30:,.1f} usable. {_remedy(problem, gpus)}"
    )


def fewest_gpus(problem: SearchProblem, more_than: int) -> int | None:
    """The fewest GPUs above a number on which the run fits by data parallelism alone; None if none do."""
    counts = (n for n in _divisors(problem.config.train.samples_per_step) if n > more_than)
    return next((count for count in counts if _fitting(problem, count, 1)[0]), None)


def _fitting(problem: SearchProblem, gpus: int, tensor: int) -> tuple[list[ParallelLayout], float]:
    """The layouts that fit, each with the least recomputation that does, and the fewest bytes of all.

    Gradients add up in shards (parallel.accumulate) only where the run says so, or where nothing else fits.
    """
    found, smallest = list[ParallelLayout](), float("inf")
    own = problem.config.parallel.accumulate
    for accumulate in dict.fromkeys((own, "sharded")):
        for without in layouts(problem.config, gpus, tensor):
            if accumulate != own and not without.adds_up:
                continue
            for share in RECOMPUTED.values():  # less recomputation is always faster
                layout = replace(without, recomputed=share, accumulate=accumulate)
                total = problem.memory(layout).total
                smallest = min(smallest, total)
                if total <= problem.machine.usable_memory:
                    found.append(layout)
                    break
        if found:
            break
    return found, smallest


def _remedy(problem: SearchProblem, gpus: int) -> str:
    """What would make the run fit, as far as it was tried."""
    remedies: list[str] = []
    packed = None if problem.packs else problem.packed
    if packed is not None and _fitting(packed, gpus, 1)[0]:
        remedies.append("set recipe.saved_inputs to packed")
    if (more := fewest_gpus(problem, gpus)) is not None:
        remedies.append(f"use {more:,} GPUs or more")
    if not remedies:
        remedies.append("use GPUs with more memory, a shorter train.seq_len, or a smaller model")
    text = ", or ".join(remedies)
    return f"{text[0].upper()}{text[1:]}."


def layouts(config: RunConfig, gpus: int, tensor: int) -> Iterator[ParallelLayout]:
    """Every layout of the run's sequences per step, without recomputation."""
    samples = config.train.samples_per_step
    ranks = usable_ranks(samples, gpus // tensor)
    own = samples // ranks
    for shard in _divisors(ranks):
        for micro_batch in _divisors(own):
            if micro_batch > _MOST_SEQUENCES:
                continue
            yield ParallelLayout(
                replicate=ranks // shard,
                shard=shard,
                tensor=tensor,
                micro_batch=micro_batch,
                accumulation=own // micro_batch,
                gradients=2 if config.parallel.gradients == "bf16" else 4,
                gather=config.parallel.gather,
                gather_weights=config.parallel.gather_weights,
                reshard=config.parallel.reshard,
                accumulate=config.parallel.accumulate,
            )


def usable_ranks(samples: int, ranks: int) -> int:
    """The largest number of ranks, at most `ranks`, that can share a step's sequences equally."""
    return max(count for count in _divisors(samples) if count <= ranks)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
