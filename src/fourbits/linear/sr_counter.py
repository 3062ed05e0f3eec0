"""What random bits depend on at run time: the clock of a micro-batch, and the key of each operand in it."""

import functools

import torch
from torch import Tensor

from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.philox import ROLES

#: what the random bits of a layer depend on at run time; int64 [5], see `new_clock`
CLOCK_FIELDS = ("seed", "step", "first_token", "first_token / 16", "zero")
_SEED, _STEP, _TOKEN, _TOKEN_BLOCK, _ZERO = range(5)
#: for each role, which clock fields are (seed, stream, step, first row, first block) of its sr_key
_TOKENS_ARE_ROWS = (_SEED, _ZERO, _STEP, _TOKEN, _ZERO)
_TOKENS_ARE_SUMMED = (_SEED, _ZERO, _STEP, _ZERO, _TOKEN_BLOCK)
_NO_TOKENS = (_SEED, _ZERO, _STEP, _ZERO, _ZERO)
OPERANDS = ROLES[:6]
KEY_FIELDS = {
    "fprop.lhs": _TOKENS_ARE_ROWS,
    "fprop.rhs": _NO_TOKENS,
    "dgrad.lhs": _TOKENS_ARE_ROWS,
    "dgrad.rhs": _NO_TOKENS,
    "wgrad.lhs": _TOKENS_ARE_SUMMED,
    "wgrad.rhs": _TOKENS_ARE_SUMMED,
}


def new_clock(seed: int, step: int, first_token: int, device: torch.device | str = "cpu") -> Tensor:
    """The clock of one micro-batch: int64 [5], CLOCK_FIELDS."""
    entries = [seed, step, first_token, first_token // 16, 0]
    if torch.device(device).type != "cuda":
        return torch.tensor(entries, dtype=torch.int64, device=device)
    clock = torch.tensor(entries, dtype=torch.int64, pin_memory=True)
    return clock.to(device, non_blocking=True)  # without a wait for the card


def draws(spec: OperandSpec) -> bool:
    """Whether an operand of this spec takes random bits."""
    return spec.stochastic or bool(spec.rht and spec.signs in ("per-layer", "per-call"))


@functools.lru_cache(maxsize=8192)
def key_parts(layer: int, role: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Fields of the clock, and what is added to them, that make an operand's key, int64 [5]."""
    fields = torch.tensor(KEY_FIELDS[role], device=device)
    stream = torch.tensor([0, layer * 8 + ROLES.index(role), 0, 0, 0], dtype=torch.int64, device=device)
    return fields, stream
