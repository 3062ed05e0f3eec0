"""Amax policies: operands whose FP32 scale comes from past steps. docs/nvfp4.md, section 16.

One book holds the state of all layers of a model in three stacked tensors, [layers, 6 roles, fields], so that
a step costs a few kernels whatever the number of layers, and compiled graphs see a few tensors. Training
observes maxima into the book; once per optimizer step they are committed, which fixes what the next one uses.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from fourbits.quant.philox import ROLES
from fourbits.recipe.recipe import GemmTable

#: the six operands of a linear, in the order of their streams
OPERANDS = ROLES[:6]
#: fields of `amaxes`: what this step uses (-1: the operand's own), what it has observed (-1: nothing), and
#: from HISTORY on the committed steps, newest first
IN_USE, PENDING, HISTORY = range(3)
#: fields of `counters`: committed steps in the history; saturated and all blocks, of this step and before it
COUNT, SATURATED, BLOCKS, ALL_SATURATED, ALL_BLOCKS = range(5)
#: fields of `policy`: length of the history (0: current), interval (0: none), headroom
_LENGTH, _INTERVAL, _HEADROOM = range(3)

#: (tensor, how) -> the tensor reduced over all data-parallel ranks
Reduce = Callable[[Tensor, Literal["max", "sum"]], Tensor]


class AmaxBook:
    """State of the layers with these tables. A layer's place in the list is its slot."""

    def __init__(self, tables: Sequence[GemmTable]):
        policy = torch.tensor([[_policy(table, role) for role in OPERANDS] for table in tables]).double()
        length = int(policy[..., _LENGTH].max())
        self.policy = policy
        self.amaxes = torch.zeros(len(tables), len(OPERANDS), HISTORY + length)
        self.amaxes[..., :HISTORY] = -1.0
        self.counters = torch.zeros(len(tables), len(OPERANDS), 5, dtype=torch.int64)
        #: the step that pending belongs to; None before the first set_step
        self.step: int | None = None

    def to(self, device: torch.device) -> "AmaxBook":
        """Itself, with its tensors on the device where layers compute."""
        if self.amaxes.device != device and device.type != "meta":
            self.amaxes, self.counters = self.amaxes.to(device), self.counters.to(device)
            self.policy = self.policy.to(device)
        return self

    def advance(self, step: int, reduce: Reduce | None) -> None:
        """Go to an optimizer step: commit what an earlier one observed, discard what a later one did.

        New tensors take the place of the old, so that a backward pass still under way keeps what its forward
        used. Raises ValueError where several ranks would each use a maximum of their own.
        """
        if step == self.step:
            return
        amaxes, counters = self.amaxes.clone(), self.counters.clone()
        if self.step is not None and step > self.step:
            amaxes, counters = committed(*reduced(amaxes, counters, reduce), self.policy)
        elif self.step is not None and step < self.step:
            amaxes[..., PENDING] = -1.0
        amaxes[..., IN_USE] = in_use(amaxes, self.policy, step)
        self.amaxes, self.counters, self.step = amaxes, counters, step


def policies_of(table: GemmTable) -> bool:
    """Whether any operand of the table keeps a state."""
    return any(table.operand(role).amax_policy != "current" for role in OPERANDS)


def committed(amaxes: Tensor, counters: Tensor, policy: Tensor) -> tuple[Tensor, Tensor]:
    """Both after the end of a step: pending becomes the newest entry of the history, counts are added up."""
    pending, history = amaxes[..., PENDING], amaxes[..., HISTORY:]
    length = policy[..., _LENGTH]
    place = torch.arange(history.shape[-1], device=history.device)
    shifted = torch.cat((pending[..., None], history[..., :-1]), -1)
    shifted = torch.where(place < length[..., None], shifted, 0.0)
    seen = pending >= 0
    amaxes, counters = amaxes.clone(), counters.clone()
    amaxes[..., HISTORY:] = torch.where(seen[..., None], shifted, history)
    amaxes[..., PENDING] = -1.0
    counters[..., COUNT] = torch.minimum(counters[..., COUNT] + seen, length.long())
    counters[..., ALL_SATURATED:] += counters[..., SATURATED:ALL_SATURATED]
    counters[..., SATURATED:ALL_SATURATED] = 0
    return amaxes, counters


def in_use(amaxes: Tensor, policy: Tensor, step: int | Tensor) -> Tensor:
    """The amax of every operand at a step, fp32; -1 where it is the operand's own."""
    newest = amaxes[..., HISTORY:].amax(-1)
    interval = policy[..., _INTERVAL].long()
    measured = (interval > 0) & (step % interval.clamp_min(1) == 0)
    largest = torch.finfo(torch.float32).max
    scaled = (policy[..., _HEADROOM].to(torch.float32) * newest).clamp_max(largest)
    return torch.where((newest == 0) | measured, -1.0, scaled)


def reduced(amaxes: Tensor, counters: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor]:
    """Both with pending and the counts of the running step taken over all ranks, on every rank."""
    if reduce is None:
        _check_alone()
        return amaxes, counters
    amaxes, counters = amaxes.clone(), counters.clone()
    amaxes[..., PENDING] = reduce(amaxes[..., PENDING].contiguous(), "max")
    running = slice(SATURATED, ALL_SATURATED)
    counters[..., running] = reduce(counters[..., running].contiguous(), "sum")
    return amaxes, counters


@torch.library.custom_op("fourbits::observe", mutates_args={"amaxes", "counters"})
def observe(
    amaxes: Tensor, counters: Tensor, own: Tensor, counts: Tensor, slot: int, first_role: int
) -> None:
    """Note what operands of a training step were. own: fp32 [n], NaN where there is nothing to note; counts:
    int64 [n, 2]; of n roles from first_role on.
    """
    roles = slice(first_role, first_role + own.shape[0])
    pending = amaxes[slot, roles, PENDING]
    pending.copy_(torch.where(torch.isfinite(own), torch.maximum(pending, own), pending))
    # a forward inside a backward pass recomputes what was counted before; for a maximum that does not matter
    if first_role or torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage]
        counters[slot, roles, SATURATED:ALL_SATURATED] += counts


@observe.register_fake
def _(amaxes: Tensor, counters: Tensor, own: Tensor, counts: Tensor, slot: int, first_role: int) -> None:
    return None


@torch.library.custom_op("fourbits::commit", mutates_args={"amaxes", "counters"})
def commit(amaxes: Tensor, counters: Tensor, policy: Tensor, clock: Tensor, slot: int) -> None:
    """Commit one layer by itself, where nobody calls set_step. clock: its own, at the step that begins."""
    new_amaxes, new_counters = committed(amaxes[slot], counters[slot], policy[slot])
    new_amaxes[..., IN_USE] = in_use(new_amaxes, policy[slot], clock[1])
    amaxes[slot], counters[slot] = new_amaxes, new_counters


@commit.register_fake
def _(amaxes: Tensor, counters: Tensor, policy: Tensor, clock: Tensor, slot: int) -> None:
    return None


def _policy(table: GemmTable, role: str) -> tuple[float, float, float]:
    """(length of history, interval, headroom) of one operand."""
    spec = table.operand(role)
    if spec.amax_policy == "current" or (role == "dgrad.rhs" and table.shares_weight):
        return (0.0, 0.0, 1.0)
    length = spec.amax_history if spec.amax_policy == "history" else 1
    return (length, spec.amax_interval if spec.amax_policy == "interval" else 0.0, spec.amax_headroom)


def _check_alone() -> None:
    """Raises ValueError where several ranks would each use a maximum of their own."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ValueError(
            "amax_policy: one other than current needs maxima over all ranks. Pass set_step and recipe_state "
            "reduce=function; function(x, how) all-reduces x by how ('max' or 'sum') and returns it."
        )
