"""Random training sequences in which inputs and weights are written between calls, often unseen by autograd.

Every call must have the bits of a fresh copy of the model that gets a copy of the input: whatever a layer
keeps from earlier calls may only save time. A raw write is one that no version counter shows.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourbits import convert, get_recipe, set_step
from fourbits.recipe.recipe import KeepBF16

STEPS, MICRO_BATCHES, ROWS, WIDTH = 2, 3, 32, 48
#: a layer's input: a buffer that a loader refills, a leaf with a gradient, or the result of a computation
KINDS = ("buffer", "leaf", "computed")
Write = Callable[[Tensor, Tensor], None]


def through_an_alias(x: Tensor, value: Tensor) -> None:
    """As raw kernels and collectives write: through a second tensor over the same memory."""
    alias = torch.empty(0, dtype=x.dtype, device=x.device)
    alias.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
    version = x._version
    alias.copy_(value)
    assert x._version == version


def through_data(x: Tensor, value: Tensor) -> None:
    x.data.copy_(value)


def in_place(x: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        x.copy_(value)


class Call(NamedTuple):
    """A call of a layer, with everything needed to repeat it."""

    place: tuple[int, int]
    #: as it was, and its input
    model: nn.ModuleList
    x: Tensor
    layer: int
    trains: bool
    found: list[Tensor]

    def check(self) -> None:
        set_step(self.model, *self.place)
        expected = called(self.model[self.layer], self.x, self.trains)
        for one, other in zip(self.found, expected, strict=True):
            assert torch.equal(one, other), (self.place, self.layer)


class Sequence:
    """One random sequence: sibling linear layers of one model in random order, with writes in between."""

    def __init__(
        self, seed: int, recipe: str, device: str, raw_writes: tuple[Write, ...] = (), packed: bool = False
    ) -> None:
        """raw_writes: further ways to write an input without a trace; packed: whether inputs are saved
        packed.
        """
        self.random, self.device = Random(seed), device
        torch.manual_seed(seed)
        self.model = nn.ModuleList(nn.Linear(WIDTH, 64, bias=i == 2) for i in range(3)).to(device)
        saved = "packed" if packed else "exact"
        convert(self.model, replace(get_recipe(recipe), keep_bf16=KeepBF16(), saved_inputs=saved))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.raw_writes = (through_an_alias, through_data, *raw_writes)
        self.kind, self.dtype = self.random.choice(KINDS), self.random.choice((torch.float32, torch.bfloat16))
        self.x, self.weights_written = self.new_input(), True
        self.calls: list[Call] = []

    def run(self) -> None:
        """Run all calls, then repeat each. Raises AssertionError where a fresh model computes other bits."""
        for step in range(STEPS):
            for micro_batch in range(MICRO_BATCHES):
                place = step, 2 * ROWS * micro_batch
                set_step(self.model, *place, same_weights=not self.weights_written)
                self.weights_written = False
                for layer in self.random.sample(range(3), 3):
                    self.maybe_write_input()
                    self.call(layer, place)
                self.maybe_write_weights(place)
            self.update_weights("optimizer")
        for call in self.calls:  # not in between: only the last input's operands are kept
            call.check()

    def call(self, layer: int, place: tuple[int, int], trains: bool = True) -> None:
        model, x = copy.deepcopy(self.model), self.x.detach().clone().requires_grad_(self.x.requires_grad)
        found = called(self.model[layer], self.x, trains)
        self.calls.append(Call(place, model, x, layer, trains, found))

    def new_input(self) -> Tensor:
        x = torch.randn(ROWS, WIDTH, device=self.device).to(self.dtype)
        if self.kind != "buffer":
            x.requires_grad_()
        return x * 1.5 if self.kind == "computed" else x

    def maybe_write_input(self) -> None:
        """Nothing, a write that autograd sees, a raw one, or another tensor in the old one's memory.

        No raw write reaches a tensor of a graph between its readers: that would corrupt nn.Linear, too.
        """
        ways: list[Write | None] = [None, in_place]
        ways += self.raw_writes if self.kind != "computed" else ()
        write = self.random.choice(ways)
        if write is not None:
            write(self.x, torch.randn_like(self.x))
        elif self.random.random() < 0.3:
            del self.x
            self.x = self.new_input()

    def maybe_write_weights(self, place: tuple[int, int]) -> None:
        """After a micro-batch, perhaps write weights; calls before the next set_step read the new values."""
        way = self.random.choice((None, None, None, "optimizer", "alias", "data"))
        if way is not None:
            self.update_weights(way)
            for layer in range(3):
                self.call(layer, place, trains=False)

    def update_weights(self, way: str) -> None:
        """Write all weights, none of which advances its version."""
        self.weights_written = True
        if way == "optimizer":
            for parameter in self.model.parameters():
                parameter.grad = torch.randn_like(parameter)
            self.optimizer.step()
            return
        for parameter in self.model.parameters():
            write = through_an_alias if way == "alias" else through_data
            write(parameter, torch.randn_like(parameter))


def called(linear: nn.Module, x: Tensor, trains: bool) -> list[Tensor]:
    """Y and, where the call trains, the gradients of parameters and of an X that has one."""
    y = linear(x)
    if not trains:
        return [y.detach()]
    sources = [*linear.parameters(), *([x] if x.requires_grad else [])]
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), sources)]
