"""Reused operands: a weight's in later micro-batches of a step, an input's in sibling layers.

Reuse must not change a bit, so an operand is reused only if its tensor cannot have been written since.
Version counters cannot show that: fused optimizers, `.data`, collectives and raw kernels do not advance them.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fourbits.linear.corrected import Operands
from fourbits.linear.sr_counter import SrCounter

#: the type of a weight's operand: of one layer, or of experts
T = TypeVar("T")


class KeptWeight:
    """Fprop's operand of a layer's weight, kept for the later micro-batches of an optimizer step.

    Only the caller of `set_step` knows that no weight was written since the last one, so an operand is kept
    and reused only under `set_step(..., same_weights=True)`, by the first call of the layer after it.
    """

    def __init__(self) -> None:
        self._kept: tuple[tuple[Any, ...], int, Any] | None = None
        self._generation = -1
        #: whether calls read the parameter itself; one gathered by sharding must not outlive a forward
        self.plain = True
        self._dims = 0

    def found(self, weight: Tensor) -> None:
        """Note the parameter as it is between steps, where FSDP2 has a shard in the place of each weight."""
        self._dims = mesh_dims(weight)
        self.plain = type(weight) is nn.Parameter

    def read(self, weight: Tensor) -> None:
        """Note a weight that a call reads as a DTensor: FSDP2 gathers one of fewer dimensions of a mesh."""
        self.plain = self._dims == mesh_dims(weight)

    def operand(self, weight: Tensor, plan: object, counter: SrCounter, make: Callable[[], T]) -> T:
        """The weight's operand: the kept one if valid, else a new one, kept if it may be reused.

        A further call within a micro-batch computes a new operand and leaves the kept one in place: a CUDA
        graph of a later micro-batch may read it there.
        """
        first_call = self._generation != counter.generation
        self._generation = counter.generation
        if not (counter.reuses_weights and self.plain):
            self._kept = None
            return make()
        key = (weight.data_ptr(), weight._version, weight.stride(), plan, _is_captured(weight))
        kept = self._kept
        if kept is not None and kept[0] == key:
            if first_call and kept[1] == counter.weights_version:
                return kept[2]
            if not first_call:
                return make()
        self._kept = kept = None  # frees its memory before the next one is allocated
        operand = make()
        self._kept = (key, counter.weights_version, operand)
        return operand

    def __getstate__(self) -> dict[str, Any]:
        """Without the operand, which copies and saved files of a model do not need."""
        return {**vars(self), "_kept": None, "_generation": -1}


def mesh_dims(weight: Tensor) -> int:
    """Over how many dimensions of a mesh a DTensor is placed; 0 for a plain tensor."""
    return len(getattr(weight, "placements", ()))


class _Last:
    """One thread's last entry: (reference to the tensor, key, operands), replaced as a whole."""

    __slots__ = ("__weakref__", "entry")

    def __init__(self) -> None:
        self.entry: tuple[weakref.ref[Tensor], tuple[Any, ...], Operands] | None = None

    def forget(self, source: "weakref.ref[Tensor]") -> None:
        """Drop the operands of a freed tensor; any thread may have freed it."""
        entry = self.entry
        if entry is not None and entry[0] is source:
            self.entry = None


class SharedInput:
    """The operands of the tensor that a thread quantized last, shared by layers that read the same tensor.

    Only for inputs that are `shareable`.
    """

    def __init__(self) -> None:
        self._threads = threading.local()

    def operands(self, source: Tensor, plan: object, make: Callable[[], Operands]) -> Operands:
        """The operands of `source` under a plan: the last ones if they match, else new ones.

        They are freed with `source`.
        """
        last: _Last | None = getattr(self._threads, "last", None)
        if last is None:
            last = self._threads.last = _Last()
        key = (source._version, source.data_ptr(), plan, _is_captured(source))
        entry = last.entry
        if entry is not None and entry[0]() is source and entry[1] == key:
            return entry[2]
        last.entry = entry = None  # frees its memory before the next operands are allocated
        found = make()
        last.entry = (weakref.ref(source, last.forget), key, found)
        return found


def shareable(source: Tensor) -> bool:
    """Whether layers that read a tensor in training may share its operands: if an autograd graph computed it.

    nn.Linear saves such a tensor, so a write between two readers that leaves the version counter unchanged
    would corrupt nn.Linear's gradients, too. Buffers may be written at any time, by collectives or replays.
    """
    return source.grad_fn is not None and not source.is_inference()


def _is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured on x's device.

    A graph must compute its own operands: at a replay x holds other values, and the graph's tensors are
    computed by replays only.
    """
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
