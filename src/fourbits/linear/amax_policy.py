"""Amax tracking: amax policies and adaptive layouts. docs/nvfp4.md, sections 16 and 17.

The state of a model's layers is three stacked tensors, [layers, 6 roles, fields], so that a step launches
few kernels whatever the number of layers, and compiled graphs take few inputs. Training records observations
in them; once per optimizer step they are committed, which sets what the next step uses.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fourbits.operators import operator
from fourbits.quant.kernels.support import unsupported_device
from fourbits.quant.reference.philox import ROLES
from fourbits.recipe.recipe import GemmTable
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.linear.kernels import observe_triton as amax_triton

#: the six operands of a linear layer, in the order of their streams
OPERANDS = ROLES[:6]
#: fields of `amaxes`: the amax that this step uses (-1: the operand's own), the largest that it has observed
#: (-1: none), and from HISTORY on the committed steps, newest first
IN_USE, PENDING, HISTORY = range(3)
#: fields of `counters`: committed steps in the history, the chosen layout (1: the alternative), saturated and
#: all blocks of past steps; then, from RUNNING on, of the current step: saturated and all blocks, and of the
#: layout statistics all and those in favour of the alternative layout
COUNT, LAYOUT, ALL_SATURATED, ALL_BLOCKS, SATURATED, BLOCKS, LAYOUT_ALL, LAYOUT_OTHER = range(8)
RUNNING, COUNTERS = SATURATED, 8
#: fields of `policy`: length of the history (0: current), interval (0: none), headroom, and how many times
#: LAYOUT_OTHER must exceed LAYOUT_ALL for the alternative layout (0: not adaptive)
LENGTH, _INTERVAL, _HEADROOM, _LAYOUT_FACTOR = range(4)
_LAYOUT_FACTORS = {"none": 0, "outer": 64, "block": 4}

#: (tensor, how) -> the tensor reduced over all data-parallel ranks
Reduce = Callable[[Tensor, Literal["max", "sum"]], Tensor]


def empty(policy: Tensor) -> tuple[Tensor, Tensor]:
    """(amaxes, counters) before the first step."""
    length = max(1, int(policy[..., LENGTH].max()))
    amaxes = torch.zeros(*policy.shape[:-1], HISTORY + length, dtype=torch.float32, device=policy.device)
    amaxes[..., :HISTORY] = -1.0
    return amaxes, torch.zeros(*policy.shape[:-1], COUNTERS, dtype=torch.int64, device=policy.device)


def policy_of(table: GemmTable) -> list[tuple[float, float, float, float]]:
    """The policies of a table's six operands: (length of history, interval, headroom, layout factor)."""
    found = []
    for role in OPERANDS:
        spec = table.operand(role)
        if role == "dgrad.rhs" and table.shares_weight:
            found.append((0.0, 0.0, 1.0, 0.0))  # shares Fprop's operand
            continue
        lengths = {"current": 0, "history": spec.amax_history}
        interval = spec.amax_interval if spec.amax_policy == "interval" else 0
        factor = _LAYOUT_FACTORS[spec.adaptive]
        found.append((lengths.get(spec.amax_policy, 1), interval, spec.amax_headroom, factor))
    return found


def committed(amaxes: Tensor, counters: Tensor, policy: Tensor) -> tuple[Tensor, Tensor]:
    """Amaxes and counters after the end of a step: pending becomes the newest entry of the history, counts
    are added to the totals, and recorded layout statistics choose the layout.
    """
    pending, history = amaxes[..., PENDING], amaxes[..., HISTORY:]
    length = policy[..., LENGTH]
    place = torch.arange(history.shape[-1], device=history.device, dtype=torch.int64)
    shifted = torch.cat((pending[..., None], history[..., :-1]), -1)
    shifted = torch.where(place < length[..., None], shifted, 0.0)
    seen = pending >= 0
    amaxes, counters = amaxes.clone(), counters.clone()
    amaxes[..., HISTORY:] = torch.where(seen[..., None], shifted, history)
    amaxes[..., PENDING] = -1.0
    counters[..., COUNT] = torch.minimum(counters[..., COUNT] + seen, length.long())
    counters[..., ALL_SATURATED:RUNNING] += counters[..., SATURATED:LAYOUT_ALL]
    every, other = counters[..., LAYOUT_ALL], counters[..., LAYOUT_OTHER]
    chosen = policy[..., _LAYOUT_FACTOR].long() * other > every
    counters[..., LAYOUT] = torch.where(every > 0, chosen, counters[..., LAYOUT])
    counters[..., RUNNING:] = 0
    return amaxes, counters


def discarded(amaxes: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
    """Amaxes and counters without the observations of the current step."""
    amaxes, counters = amaxes.clone(), counters.clone()
    amaxes[..., PENDING] = -1.0
    counters[..., RUNNING:] = 0
    return amaxes, counters


def in_use(amaxes: Tensor, policy: Tensor, step: int | Tensor) -> Tensor:
    """The amax that every operand uses at a step, fp32; -1 for the operand's own."""
    newest = amaxes[..., HISTORY:].amax(-1)
    interval = policy[..., _INTERVAL].long()
    measured = (interval > 0) & (step % interval.clamp_min(1) == 0)
    largest = torch.finfo(torch.float32).max
    scaled = (policy[..., _HEADROOM].to(torch.float32) * newest).clamp_max(largest)
    return torch.where((newest == 0) | measured, -1.0, scaled)


def reduced(amaxes: Tensor, counters: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor]:
    """Amaxes and counters with pending and the current step's counts all-reduced over ranks."""
    if reduce is None:
        _check_alone()
        return amaxes, counters
    amaxes, counters = amaxes.clone(), counters.clone()
    amaxes[..., PENDING] = reduce(amaxes[..., PENDING].contiguous(), "max")
    counters[..., RUNNING:] = reduce(counters[..., RUNNING:].contiguous(), "sum")
    return amaxes, counters


def _writes_in_place(*_arguments: object) -> None:
    """The fake of operators that return nothing."""


@operator(
    "observe(Tensor(a!) amaxes, Tensor(b!) counters, Tensor own, Tensor counts, SymInt slot, int first_role) "
    "-> ()",
    _writes_in_place,
)
def observe(
    amaxes: Tensor, counters: Tensor, own: Tensor, counts: Tensor, slot: int, first_role: int
) -> None:
    """Record the amax stats of n operands in a training step, roles first_role and following.

    own: fp32 [n], NaN or negative where there is nothing to record; counts: int64 [n, 4], the fields from
    RUNNING on.
    """
    roles = slice(first_role, first_role + own.shape[0])
    pending, running = amaxes[slot, roles, PENDING], counters[slot, roles, RUNNING:]
    # a forward inside a backward pass is a recomputation, already counted; a maximum is not affected
    counted_before = not first_role and torch._C._current_graph_task_id() != -1  # pyright: ignore
    if unsupported_device(amaxes.device) is None:
        amax_triton.observe(pending, running, own, counts, not counted_before)
        return
    torch.maximum(pending, own.nan_to_num(nan=-1.0, posinf=-1.0), out=pending)
    if not counted_before:
        running += counts


@operator(
    "commit(Tensor(a!) amaxes, Tensor(b!) counters, Tensor policy, Tensor sr_counter, SymInt slot) -> ()",
    _writes_in_place,
)
def commit(amaxes: Tensor, counters: Tensor, policy: Tensor, sr_counter: Tensor, slot: int) -> None:
    """Commit a single layer, if set_step is not called. sr_counter: the layer's own, at the step to start."""
    new_amaxes, new_counters = committed(amaxes[slot], counters[slot], policy[slot])
    new_amaxes[..., IN_USE] = in_use(new_amaxes, policy[slot], sr_counter[1])
    amaxes[slot], counters[slot] = new_amaxes, new_counters


def _check_alone() -> None:
    """Raises ValueError on several ranks, where each would use a different maximum."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ValueError(
            "amax policies and adaptive layouts: must use values from all ranks, got reduce=None. Pass "
            "set_step and recipe_state a reduce(x, 'max' or 'sum') that returns x all-reduced over the ranks."
        )
