"""What a linear on a card makes once and uses again: its weight in every micro-batch of a step, and an input
that several linears read.

Nothing here changes a bit: an operand is used again only where it would come out the same. The host sees that
by identity, never by comparing values, so where a tensor's identity says nothing (inside compiled graphs, in
evaluation) operands are made anew.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fourbits.quant.tensor import ExactOperand, QuantizedTensor

Kept = ExactOperand | QuantizedTensor
Operands = tuple[Kept, ...]


class KeptWeight:
    """A linear's weight as Fprop multiplies it, for the later micro-batches of an optimizer step.

    Optimizers need not tell autograd that they wrote a weight (the fused ones and those that write through
    `.data` do not), so a version counter alone would let a stale weight live. What is kept therefore serves
    one forward for every `set_step` that goes on within a step, and nothing else.
    """

    def __init__(self) -> None:
        self._kept: tuple[tuple[Any, ...], Kept] | None = None
        #: whether steps have several micro-batches, as far as is known, and whether what is kept may serve
        self._keeps = self._valid = False

    def begin(self, same_step: bool, plain: bool) -> None:
        """A micro-batch begins: a later one of the step that made what is kept, or any other.

        plain: whether the weight is an ordinary parameter; what sharding puts together lives for one forward.
        """
        self._keeps = plain and (self._keeps or same_step)
        self._valid = self._keeps and same_step
        if not self._valid:
            self._kept = None

    def operand(self, weight: Tensor, table: str, make: Callable[[], Kept]) -> Kept:
        """The weight's operand: the one kept if it may serve now, else made, and kept where that may pay.

        A layer that is called again within a micro-batch makes its own and leaves what is kept: the graph of
        a later micro-batch reads it in its place, which must not be given to anything else.
        """
        valid, self._valid = self._valid, False
        if not self._keeps:
            return make()
        facts = (weight.data_ptr(), weight._version, weight.dtype, weight.shape, weight.stride(), table)
        facts += (_is_captured(weight),)
        if self._kept is not None and self._kept[0] == facts:
            return self._kept[1] if valid else make()
        made = make()
        self._kept = (facts, made)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Nothing that is kept: copies and saved files of a model hold no operands."""
        return {"_kept": None, "_keeps": False, "_valid": False}


class SharedInput:
    """The operands of the tensor that was quantized last, for linears that read the same one."""

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._facts: tuple[Any, ...] = ()
        self._made: Operands = ()

    def operands(self, source: Tensor, how: tuple[Any, ...], make: Callable[[], Operands]) -> Operands:
        """The operands of `source` made as `how` says: the last ones if they are these, else made anew.

        They live no longer than `source` itself.
        """
        if source.is_inference():
            return make()
        facts = (source._version, source.data_ptr(), how, _is_captured(source))
        if self._source is None or self._source() is not source or self._facts != facts:
            self._made = ()
            self._made = make()
            self._source, self._facts = weakref.ref(source, self._forget), facts
        return self._made

    def _forget(self, source: "weakref.ref[Tensor]") -> None:
        if source is self._source:
            self._source, self._made = None, ()


def _is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph records what is done to x now.

    A graph must make its own operands, as a replay finds other numbers in x; and what it makes is there at
    replays only.
    """
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def runs_directly(x: Tensor) -> bool:
    """Whether a call may go around the operators: eagerly, on a card, on a plain tensor nobody traces."""
    if torch.compiler.is_compiling() or not x.is_cuda or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    return torch._C._len_torch_dispatch_stack() == 0  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
