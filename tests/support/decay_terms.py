"""What rounding errors of the gradients of dt and a are relative to: the sizes of the terms they add."""

from collections.abc import Callable

import torch
from torch import Tensor

#: FP32's exp is 0 below this exponent
LOWEST = 104.0


def term_sizes(
    gradients: Callable[[tuple[Tensor, ...], Tensor], list[Tensor]], args: tuple[Tensor, ...], dy: Tensor
) -> dict[str, Tensor]:
    """Sums of the magnitudes of the terms of ddt and da, in FP64.

    gradients: (x, dt, a, b, c, d), dy -> y, dx, ddt, da, ... in FP64, exact. Every term is a product of dt,
    of decays and of elements of x, b, c and dy. Where these are not negative, no terms of the gradients of
    log-decays and of dt x cancel, and the gradients of the magnitudes are the sums of the magnitudes.
    ddt = a dlog + <d(dt x), x> has one part of each sign.
    """
    x, dt, a, b, c, d = args
    _, dx, ddt, da, *_ = gradients((x.abs(), dt, a, b.abs(), c.abs(), torch.zeros_like(d)), dy.abs())
    written = (dx * x.abs()).sum(-1) / dt
    return {"ddt": written + (written - ddt), "da": da}


def roundings(dt: Tensor, a: Tensor) -> float:
    """FP32 roundings of a term, in EPS: a few of its factors and sums, and half of its largest exponent.

    exp(-L) of a rounded L is off by L EPS / 2. The strongest decay of one token is the largest exponent that
    matters: longer spans have larger ones, but their terms are smaller by more.
    """
    return 8 + min(float((dt * a).detach().abs().max()), LOWEST) / 2
