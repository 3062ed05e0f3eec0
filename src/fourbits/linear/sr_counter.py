"""The run-time inputs of the random bits: one counter for all layers that were converted together.

`set_step` writes it, so random bits have no state to save or restore: a resumed run sets its step.
"""

import functools
import itertools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from fourbits.operators import operator
from fourbits.quant.request import OPERAND_ROLES

#: entries of a counter, int64 [9]; features are not 0 only in layers that are shards by features
COUNTER_FIELDS = (
    *("seed", "step", "first_token", "first_token / 16", "zero"),
    *("first_in_feature", "first_in_feature / 16", "first_out_feature", "first_out_feature / 16"),
)
_SEED, _STEP, _TOKEN, _TOKEN_BLOCK, _ZERO, _IN, _IN_BLOCK, _OUT, _OUT_BLOCK = range(9)
#: role -> the entries that its key (seed, stream, step, first row, first block) consists of
KEY_FIELDS = {
    "fprop.lhs": (_SEED, _ZERO, _STEP, _TOKEN, _IN_BLOCK),
    "fprop.rhs": (_SEED, _ZERO, _STEP, _OUT, _IN_BLOCK),
    "dgrad.lhs": (_SEED, _ZERO, _STEP, _TOKEN, _OUT_BLOCK),
    "dgrad.rhs": (_SEED, _ZERO, _STEP, _IN, _OUT_BLOCK),
    "wgrad.lhs": (_SEED, _ZERO, _STEP, _OUT, _TOKEN_BLOCK),
    "wgrad.rhs": (_SEED, _ZERO, _STEP, _IN, _TOKEN_BLOCK),
}
assert tuple(KEY_FIELDS) == OPERAND_ROLES
#: whether a layer that counts its own steps has warned
_warned: list[bool] = []


@torch.inference_mode(mode=False)  # an inference tensor could be neither saved nor written in training
def new_counter(seed: int, step: int, first_token: int, device: torch.device | str = "cpu") -> Tensor:
    """The counter of one micro-batch: int64 [9], in the order of COUNTER_FIELDS."""
    entries = [seed, step, first_token, first_token // 16, 0, 0, 0, 0, 0]
    if torch.device(device).type != "cuda":
        return torch.tensor(entries, dtype=torch.int64, device=device)
    counter = torch.tensor(entries, dtype=torch.int64, device="cpu", pin_memory=True)
    return counter.to(device, non_blocking=True)  # does not synchronize


def operand_key(counter: Tensor, role: str, layer: int) -> Tensor:
    """The key of an operand's random bits, int64 [5], from a counter [9]. It does not wait for the device."""
    key = torch.stack([counter[field] for field in KEY_FIELDS[role]])
    key[1] += layer * 8 + OPERAND_ROLES.index(role)
    return key


def after_tokens(counter: Tensor, tokens: "int | Tensor") -> Tensor:
    """The counter of a call that starts `tokens` tokens into the micro-batch, a multiple of 16.

    Several counters [E, 9] for a tensor of tokens [E] and a counter [1, 9].
    """
    moved = counter.repeat(len(tokens), 1) if isinstance(tokens, Tensor) else counter.clone()
    moved[..., _TOKEN] += tokens
    moved[..., _TOKEN_BLOCK] += tokens // 16
    return moved


def of_shard(counter: Tensor, first_in: int, first_out: int) -> Tensor:
    """The counter of a layer whose weight starts at these features of a larger one, multiples of 16."""
    if not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack():  # pyright: ignore
        return counter + _offsets(first_in, first_out, counter.device)
    moved = counter.clone()  # a graph, or a mode, may not keep a constant
    for field, first in ((_IN, first_in), (_OUT, first_out)):
        moved[field] += first
        moved[field + 1] += first // 16
    return moved


@functools.lru_cache(maxsize=1 << 12)
def _offsets(first_in: int, first_out: int, device: torch.device) -> Tensor:
    """What `of_shard` adds to each entry, int64 [9]."""
    entries = [0] * len(COUNTER_FIELDS)
    for field, first in ((_IN, first_in), (_OUT, first_out)):
        entries[field], entries[field + 1] = first, first // 16
    return torch.tensor(entries, device=device, dtype=torch.int64)


def _fake_tick(counter: Tensor) -> None:
    del counter


@operator("tick(Tensor(a!) counter) -> ()", _fake_tick)
def tick(counter: Tensor) -> None:
    """Advance a layer's own counter by one step, and warn once about the limits of doing so."""
    counter[_STEP] += 1
    warn_of_own_steps()


def warn_of_own_steps() -> None:
    """Warn once per process that a layer counts its own steps."""
    if not _warned:
        _warned.append(True)
        warnings.warn(
            "fourbits: set_step was never called, so each layer counts its own backward passes. Rounding "
            "noise differs at every step, but it depends on the number of ranks and micro-batches, and a "
            "resumed run does not repeat it. Call fourbits.set_step(model, step) before each micro-batch.",
            stacklevel=3,
        )


class _Tensors:
    """The tensors of all counters in use, as attributes.

    A graph reaches a counter's tensor through this object. Through a module the compiler would treat it as a
    parameter with a fixed address, and a CUDA graph would be recorded again at every step.
    """


_tensors = _Tensors()
_numbers = itertools.count()


def _forget(name: str) -> None:
    if hasattr(_tensors, name):
        delattr(_tensors, name)


class SrCounter:
    """The counter that `set_step` advances, shared by all layers of a model with the same device and seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self._register(new_counter(seed, 0, 0, device))
        #: incremented by every set_step; a layer that last saw a lower one starts a micro-batch
        self.generation = 0
        #: unchanged over micro-batches between which, as the caller promised, no weight is written
        self.weights_version = 0
        #: whether any micro-batch has reused the weights of the previous one
        self.reuses_weights = False

    def advance(self, step: int, first_token: int, same_weights: bool) -> None:
        """Go to a micro-batch. The old tensor is not written: a pending backward pass may read it."""
        self._set(new_counter(self.seed, step, first_token, self.tensor.device))
        self.generation += 1
        self.reuses_weights |= same_weights
        self.weights_version += not same_weights

    def on(self, device: torch.device) -> Tensor:
        """The tensor on a layer's device; it stays there, so a step copies it at most once."""
        if self.tensor.device != device:
            if device.type == "meta":
                return self.tensor.to(device)
            with torch.inference_mode(False):
                self._set(self.tensor.to(device))
        return self.tensor

    def traced_on(self, device: torch.device) -> Tensor:
        """As `on`, for a graph."""
        tensor: Tensor = getattr(_tensors, self.name)
        return tensor if tensor.device == device else self.on(device)

    def _set(self, tensor: Tensor) -> None:
        self.tensor = tensor
        setattr(_tensors, self.name, tensor)

    def _register(self, tensor: Tensor) -> None:
        """Choose a name that no other counter of the process has."""
        self.name = f"counter_{next(_numbers)}"
        self._set(tensor)
        weakref.finalize(self, _forget, self.name)

    def __getstate__(self) -> dict[str, Any]:
        """Without the name, of which a copy takes its own."""
        return {key: value for key, value in vars(self).items() if key != "name"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._register(self.tensor)
