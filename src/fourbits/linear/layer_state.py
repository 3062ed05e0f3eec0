"""What a converted layer knows beyond nn.Linear, and what a call of it knows beforehand."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourbits.linear.amax_history import OperandBook
from fourbits.linear.operand_cache import KeptWeight
from fourbits.linear.sr_counter import new_clock
from fourbits.recipe.recipe import GemmTable


class LinearState:
    """What a converted layer knows beyond nn.Linear: its table, its number, and the clock of its random
    bits.
    """

    def __init__(
        self, original: type[nn.Linear], table: GemmTable, layer: int, seed: int, quantize_eval: bool
    ):
        self.original = original
        self.table = table.to_text()
        self.layer = layer
        self.seed = seed
        self.quantize_eval = quantize_eval
        #: int64 [5], clock.CLOCK_FIELDS; shared by all layers of a model once set_step has been called
        self.clock = new_clock(seed, 0, 0)
        #: True until set_step is called: the layer then advances its own clock with every backward pass
        self.counts_itself = True
        #: the model's book and this layer's slot in it, where its table depends on the past
        self.book: OperandBook | None = None
        self.slot = 0
        #: step and first token of the last set_step, which tell whether a step goes on
        self.position: tuple[int, int] | None = None
        self.weight = KeptWeight()

    def facts(self, training: bool) -> "Facts":
        """What a call knows beforehand. Raises ValueError where layouts adapt and set_step was not called."""
        table, measured = self.table, ""
        if self.book is not None:
            table, measured = self.book.in_force[self.slot], self.book.measured[self.slot]
            if training and self.counts_itself and self.book.adapts(self.slot):
                raise ValueError(
                    "QuantizedLinear: adaptive layouts are chosen between optimizer steps. Call "
                    "fourbits.set_step(model, step) before each micro-batch."
                )
        return Facts(self.layer, table, self.counts_itself, training, measured if training else "", self.slot)

    def clock_on(self, device: torch.device) -> Tensor:
        """The clock where the layer computes; it stays there, so that a step copies it at most once."""
        if device.type == "meta":
            return self.clock.to(device)
        if self.clock.device != device:
            self.clock = self.clock.to(device)
        return self.clock

    def amaxes_on(self, device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The book's amaxes, counters and policy where the layer computes; None without a book."""
        if self.book is None:
            return (None, None, None)
        book = self.book.to(device)
        return (book.amaxes, book.counters, book.policy)


class Facts(NamedTuple):
    """What a call knows beforehand."""

    layer: int
    table: str
    #: whether the layer advances its own clock
    counts_itself: bool
    #: whether this is training, from which the book learns
    observes: bool
    #: operands whose layout's statistics are taken, as by layout.measured_at
    measured: str
    slot: int
