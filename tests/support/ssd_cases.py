"""The SSD scan's kernels against the FP64 recurrence, values and gradients, in the interpreter and on a GPU.

Run as a program, it checks the cases in Triton's interpreter: TRITON_INTERPRET=1 python -m support.ssd_cases
"""

import os
import sys
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fourbits.model.ops.ssd.op import ssd_forward
from fourbits.model.ops.ssd.reference import ssd as recurrence
from support.decay_terms import roundings, term_sizes
from support.triton_interpreter import failures

EPS = torch.finfo(torch.float32).eps
NAMES = ("y", "dx", "ddt", "da", "db", "dc", "dd")


@dataclass(frozen=True)
class Case:
    """Sizes of a scan, and its special inputs."""

    batch: int
    length: int
    heads: int
    head_dim: int
    groups: int
    states: int
    weakest: float = 0.1
    strongest: float = 1.0
    steps: tuple[float, float] = (0.0, 0.2)
    starts: tuple[int, ...] = ()
    resets: bool = False


SMALL = (
    Case(1, 80, 4, 64, 2, 16),
    Case(1, 80, 4, 64, 2, 16, strongest=16.0),
    Case(2, 67, 2, 80, 1, 32),
    Case(2, 37, 6, 16, 3, 16),
    Case(1, 5, 2, 16, 2, 16),
    Case(1, 70, 4, 24, 1, 48, starts=(0, 1, 15, 16, 40, 41, 64)),
    Case(2, 66, 2, 16, 2, 16, starts=(33,), strongest=8.0),
    Case(1, 40, 2, 16, 1, 16, resets=True),
    Case(1, 80, 2, 16, 1, 16, weakest=15.0, strongest=16.0, steps=(2.7, 3.3)),
    Case(2, 80, 2, 16, 1, 16, weakest=15.0, strongest=16.0, steps=(0.9, 1.1)),
)


def arguments(case: Case) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor]:
    """(x, dt, a, b, c, d), starts, dy.

    x, b and c are slices of one tensor, as in the model; a, d and starts are not contiguous.
    """
    torch.manual_seed(0)
    sizes = (case.heads * case.head_dim, case.groups * case.states, case.groups * case.states)
    xbc = torch.randn(case.batch, case.length, sum(sizes))
    x, b, c = xbc.split(sizes, -1)
    dt = torch.empty(case.batch, case.length, case.heads).uniform_(*case.steps)
    if case.resets:
        dt[:, ::4] = 1e4  # the state is reset; a running FP32 sum would be off by 0.01
        dt[:, 1::4] = 1e-30  # a token that writes nothing
        x[:, ::4] *= 1e-4
    rates = -torch.empty(case.heads).uniform_(case.weakest, case.strongest)
    a, d = torch.stack((rates, torch.randn(case.heads)), 1).unbind(1)
    starts = None
    if case.starts:
        starts = torch.zeros(case.batch, case.length, dtype=torch.bool)
        starts[:, list(case.starts)] = True
        starts[1:] = starts[1:].roll(3, 1)
        starts = starts.t().contiguous().t()
    x = x.unflatten(-1, (case.heads, case.head_dim))
    b, c = b.unflatten(-1, (case.groups, -1)), c.unflatten(-1, (case.groups, -1))
    return (x, dt, a, b, c, d), starts, torch.randn(x.shape)


def exact(args: tuple[Tensor, ...], starts: Tensor | None, dy: Tensor) -> list[Tensor]:
    """y and gradients by the recurrence in FP64, document by document."""
    args = tuple(arg.double().requires_grad_() for arg in args)
    x, dt, a, b, c, d = args
    y = torch.stack([_documents(x[i], dt[i], a, b[i], c[i], d, starts, i) for i in range(len(x))])
    return [y.detach(), *torch.autograd.grad(y, args, dy.double())]


def _documents(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, starts: Tensor | None, i: int
) -> Tensor:
    bounds = [] if starts is None else starts[i, 1:].nonzero().flatten().add(1).tolist()
    pieces = zip([0, *bounds], [*bounds, len(x)], strict=True)
    return torch.cat(
        [recurrence(x[None, s:e], dt[None, s:e], a, b[None, s:e], c[None, s:e], d)[0] for s, e in pieces]
    )


def found(args: tuple[Tensor, ...], starts: Tensor | None, dy: Tensor) -> list[Tensor]:
    """y and gradients by the kernels, in the dtypes of the arguments."""
    args = tuple(arg.detach().requires_grad_() for arg in args)
    y = ssd_forward(*args, starts)
    return [y.detach(), *torch.autograd.grad(y, args, dy)]


def rms(x: Tensor) -> Tensor:
    return x.double().square().mean().sqrt()


def differences(case: Case) -> list[str]:
    """Errors of FP32 kernels beyond what FP32 sums allow."""
    args, starts, dy = arguments(case)
    got_all, exact_all = found(args, starts, dy), exact(args, starts, dy)
    # Each entry of y, dx, db, dc is a sum of products with random signs: a few roundings of its own size.
    allowed = {name: 8 * EPS * rms(value) for name, value in zip(NAMES, exact_all, strict=True)}
    # The terms of a log-decay's gradient need not have random signs: a few roundings of the terms' sizes.
    for name, terms in term_sizes(lambda args, dy: exact(args, starts, dy), args, dy).items():
        allowed[name] = roundings(args[1], args[2]) * EPS * rms(terms)
    wrong = []
    for name, got, true in zip(NAMES, got_all, exact_all, strict=True):
        error = rms(got - true)
        if not error <= allowed[name] or not got.isfinite().all():
            wrong.append(f"{name}: error {error:.3g}, allowed {allowed[name]:.3g}, size {rms(true):.3g}")
    return wrong


def main() -> int:
    """Check every case and return the number of failures."""
    return failures((case, partial(differences, case)) for case in SMALL)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    sys.exit(main())
