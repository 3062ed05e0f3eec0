"""The fastest layout of a step on N GPUs that fits their memory."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fourbits.model.config import ModelConfig
from fourbits.plan.layouts import RECOMPUTED, Layout
from fourbits.plan.linears import LinearGroup
from fourbits.plan.machine import Machine
from fourbits.plan.memory import USABLE, Memory, memory_of
from fourbits.plan.step import Step, step_of
from fourbits.train.config import RunConfig
from fourbits.train.parallel import uneven

#: ranks of tensor parallelism that are tried where nothing fits without it
_TENSOR = (2, 4, 8)
_MOST_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout with its memory and its step."""

    layout: Layout
    memory: Memory
    step: Step


@dataclass(frozen=True, slots=True)
class Subject:
    """What is laid out: a model, its linear layers by a recipe, and the run around it."""

    config: RunConfig
    groups: list[LinearGroup]
    machine: Machine

    @property
    def model(self) -> ModelConfig:
        """The configuration of the model."""
        return self.config.model

    @property
    def packs(self) -> bool:
        """Whether saved inputs are codes."""
        return self.config.recipe.saved_inputs == "packed"

    def memory(self, layout: Layout, packs: bool | None = None) -> Memory:
        """The memory of a layout. packs: in place of the recipe's choice."""
        packs = self.packs if packs is None else packs
        gpu, software = self.machine.gpu, self.machine.software
        return memory_of(self.model, self.groups, packs, self.config.train.seq_len, layout, gpu, software)

    def choice(self, layout: Layout) -> Choice:
        """A layout, computed."""
        step = step_of(self.model, self.groups, self.config.train.seq_len, layout, self.machine)
        return Choice(layout, self.memory(layout), step)


def best_layout(subject: Subject, gpus: int) -> Choice:
    """The fastest layout that fits: data parallelism alone if any does, else with tensor parallelism.

    A step keeps its number of sequences, so it may use fewer GPUs than there are. Raises ValueError if
    nothing fits.
    """
    limit = USABLE * subject.machine.gpu.memory
    smallest = float("inf")
    model, seq_len = subject.model, subject.config.train.seq_len
    for tensor in (1, *(t for t in _TENSOR if t <= gpus and not [*uneven(model, seq_len, t)])):
        fitting: list[Choice] = []
        for without in layouts(subject.config, gpus, tensor):
            for share in RECOMPUTED.values():  # less recomputation is always faster
                layout = replace(without, recomputed=share)
                total = subject.memory(layout).total
                smallest = min(smallest, total)
                if total <= limit:
                    fitting.append(subject.choice(layout))
                    break
        if fitting:
            return min(fitting, key=lambda choice: choice.step.seconds)
    raise ValueError(
        f"plan: no layout of {gpus} {subject.machine.gpu.name} fits: the least is {smallest / 2**30:,.0f} "
        f"GiB per GPU, of {limit / 2**30:,.0f} usable. Use more GPUs, or recipe.saved_inputs packed."
    )


def layouts(config: RunConfig, gpus: int, tensor: int) -> Iterator[Layout]:
    """Every layout of the run's sequences per step, without recomputation."""
    samples = config.train.samples_per_step
    ranks = usable_ranks(samples, gpus // tensor)
    own = samples // ranks
    for shard in _divisors(ranks):
        for micro_batch in _divisors(own):
            if micro_batch > _MOST_SEQUENCES:
                continue
            yield Layout(
                replicate=ranks // shard,
                shard=shard,
                tensor=tensor,
                micro_batch=micro_batch,
                accumulation=own // micro_batch,
                gradients=2 if config.parallel.gradients == "bf16" else 4,
                gather=config.parallel.gather,
            )


def usable_ranks(samples: int, ranks: int) -> int:
    """The most ranks, of those that there are, that share a step's sequences equally."""
    return max(count for count in _divisors(samples) if count <= ranks)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
