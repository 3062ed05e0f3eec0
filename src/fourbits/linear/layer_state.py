"""What a converted layer holds beyond nn.Linear's parameters."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourbits.linear.amax_history import OperandBook
from fourbits.linear.operand_cache import KeptWeight
from fourbits.linear.plan import LinearPlan
from fourbits.linear.sr_counter import SrCounter, moved_on, new_counter
from fourbits.quant.request import OPERAND_ROLES, draws
from fourbits.recipe.recipe import GemmTable

PlanKey = tuple[Any, ...]


class CallConfig(NamedTuple):
    """What a call depends on besides its tensors."""

    layer: int
    table: str
    #: whether the layer counts its own steps, because set_step was never called
    counts_itself: bool
    #: whether this is training, which amax policies record
    observes: bool
    #: operands whose layout's statistics are taken, as by adaptive_layout.measured_at
    measured: str
    slot: int


class LayerState:
    """Table, number, random counter and recipe state of one converted layer."""

    def __init__(
        self, original: type[nn.Linear], table: GemmTable, layer: int, seed: int, quantize_eval: bool
    ):
        self.original = original
        self.table = table.to_text()
        self.layer = layer
        self.seed = seed
        self.quantize_eval = quantize_eval
        self.draws = any(draws(table.operand(role)) for role in OPERAND_ROLES)
        #: the model's counter, once set_step has been called
        self.counter: SrCounter | None = None
        #: until then the layer's own, int64 [5], which every backward pass advances by a step
        self.own_counter = new_counter(seed, 0, 0)
        #: the model's recipe state and this layer's slot in it, where its table depends on past steps
        self.book: OperandBook | None = None
        self.slot = 0
        self.weight = KeptWeight()
        #: eager plans, and whether a cast comes before them, by what decides them
        self.plans: dict[PlanKey, tuple[LinearPlan, bool]] = {}
        self._generation = -1
        #: tokens that training calls of this micro-batch have met before each of them, and in all
        self._offsets: list[int] = []
        self._tokens = self._recomputed = 0

    @property
    def counts_itself(self) -> bool:
        """Whether the layer advances its own counter."""
        return self.counter is None

    def config(self, training: bool) -> CallConfig:
        """The configuration of a call. Raises ValueError where layouts adapt and set_step was not called."""
        table, measured = self.table, ""
        if self.book is not None:
            table, measured = self.book.in_force[self.slot], self.book.measured[self.slot]
            if training and self.counts_itself and self.book.adapts(self.slot):
                raise ValueError(
                    "QuantizedLinear: adaptive layouts are chosen between optimizer steps. Call "
                    "fourbits.set_step(model, step) before each micro-batch."
                )
        measured = measured if training else ""
        return CallConfig(self.layer, table, self.counts_itself, training, measured, self.slot)

    def counter_on(self, device: torch.device) -> Tensor:
        """The counter where the layer computes; it stays there, so that a step copies it at most once."""
        if self.counter is not None:
            return self.counter.on(device)
        if device.type == "meta":
            return self.own_counter.to(device)
        if self.own_counter.device != device:
            self.own_counter = self.own_counter.to(device)
        return self.own_counter

    def call_counter(self, device: torch.device, tokens: int, training: bool) -> Tensor:
        """The counter of one eager call, which nothing writes later.

        A layer that training calls several times in a micro-batch meets other tokens each time, so later
        calls draw bits from where the earlier ones ended. Recomputation repeats the calls in their order.
        """
        counter = self.counter_on(device)
        if self.counter is None:
            counter = counter.clone()
        if not (training and self.draws):
            return counter
        if self.counter is not None and self._generation != self.counter.generation:
            self._generation = self.counter.generation
            self.forget_calls()
        offset = self._offset(tokens)
        return moved_on(counter, offset) if offset else counter

    def forget_calls(self) -> None:
        """Begin a micro-batch: the next call meets its first token."""
        self._offsets.clear()
        self._tokens = self._recomputed = 0

    def _offset(self, tokens: int) -> int:
        if torch._C._current_graph_task_id() != -1:  # pyright: ignore  # inside a backward pass: recomputation
            if not self._offsets:
                return 0
            self._recomputed += 1
            return self._offsets[(self._recomputed - 1) % len(self._offsets)]
        offset = self._tokens
        self._offsets.append(offset)
        self._tokens += -(-tokens // 16) * 16
        return offset

    def __getstate__(self) -> dict[str, Any]:
        """Without plans, which copies and saved files of a model make anew."""
        return {**vars(self), "plans": {}}

    def recipe_tensors(self, device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The recipe state's amaxes, counters and policy where the layer computes; None without one."""
        if self.book is None:
            return (None, None, None)
        book = self.book.to(device)
        return (book.amaxes, book.counters, book.policy)
