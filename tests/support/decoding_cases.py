"""The kernels of a decoded token against their definitions in FP64.

Run as a program, it checks small cases in Triton's interpreter:

    TRITON_INTERPRET=1 python -m support.decoding_cases
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fourbits.generate.mamba import final_state
from fourbits.model.ops.add_norm.op import add_norm
from fourbits.model.ops.mamba_step.op import mamba_step
from fourbits.model.ops.mamba_step.weights import StepWeights
from fourbits.model.ops.ssd.op import ssd_forward, ssd_with_state
from support.mixer_cases import EPS, HALF_BIT, rms
from support.triton_interpreter import failures

#: FP32 roundings in a result, as sums over states and over a group's channels have errors of random signs
ROUNDINGS = 16
#: roundings to BF16 between a token's inputs and a result: of x, B and C, of the scan's output, of the result
HALF_ROUNDINGS = 5


@dataclass(frozen=True)
class Step:
    """Sizes of a token of a mixer. tokens: consecutive ones; begins: share that begins a document."""

    rows: int
    groups: int
    heads_per_group: int
    head_dim: int
    state_size: int
    tokens: int = 3
    begins: float = 0.0
    min_time_step: float = 0.0


# heads, channels and states that are no powers of two, one of each, and documents that begin
STEPS = (
    Step(3, 2, 3, 8, 16),
    Step(2, 1, 1, 24, 48, tokens=6, begins=0.4),
    Step(1, 4, 2, 16, 16, min_time_step=0.05),
)


def weights_of(case: Step, device: str, dtype: torch.dtype = torch.float32) -> StepWeights:
    """FP32 parameters as initialization draws them, A in [1, 16], dt from 0.001 to 0.1; in a dtype."""
    torch.manual_seed(0)
    heads = case.groups * case.heads_per_group
    inner = heads * case.head_dim
    channels = inner + 2 * case.groups * case.state_size
    dt = torch.logspace(-3, -1, heads)
    drawn = (
        torch.rand(channels, 1, 4) - 0.5,
        torch.rand(channels) - 0.5,
        dt + torch.log(-torch.expm1(-dt)),
        torch.linspace(1, 16, heads).log(),
        torch.rand(heads) + 0.5,
        torch.rand(inner) + 0.5,
    )
    taps, bias, dt_bias, a_log, d, gain = (value.to(device, dtype) for value in drawn)
    return StepWeights(taps, bias, dt_bias, a_log, d, gain, case.groups, 1e-5, case.min_time_step)


def step_errors(case: Step, device: str, dtype: torch.dtype) -> list[str]:
    """Errors beyond rounding in the outputs of consecutive tokens, and in what is kept after the last.

    projected is a part of a wider tensor, and the largest time steps exceed 20.
    """
    weights = weights_of(case, device)
    exact_weights = weights_of(case, device, torch.float64)
    heads = case.groups * case.heads_per_group
    width, channels = sum(weights.widths), weights.widths[1]
    inputs = torch.zeros(case.rows, 3, channels, dtype=dtype, device=device)
    state = torch.zeros(case.rows, heads, case.head_dim, case.state_size, device=device)
    exact_inputs, exact_state = inputs.double(), state.double()
    wrong: list[str] = []
    for token in range(case.tokens):
        projected = torch.randn(case.rows, width + 8, device=device).to(dtype)[:, :width]
        projected[0, -1] = 30
        begins = torch.rand(case.rows, device=device) < case.begins
        got = mamba_step(projected, inputs, state, begins, weights, fused=True)
        exact = mamba_step(projected.double(), exact_inputs, exact_state, begins, exact_weights, fused=False)
        wrong += _wrong(f"out {token}", got, exact, HALF_ROUNDINGS * HALF_BIT[dtype])
        assert got.dtype == dtype
    wrong += [] if torch.equal(inputs, exact_inputs.to(dtype)) else ["inputs differ"]
    return wrong + _wrong("state", state, exact_state, 2 * HALF_BIT[dtype])


def state_errors(length: int, starts: bool, device: str, dtype: torch.dtype) -> list[str]:
    """Errors beyond rounding in the state after a scan; its outputs must have the bits of `ssd_forward`."""
    torch.manual_seed(0)
    x, b, c = (torch.randn(2, length, n, p, device=device).to(dtype) for n, p in ((4, 16), (2, 32), (2, 32)))
    dt = torch.rand(2, length, 4, device=device) * 0.2
    dt[0, -length // 3 :] = 0  # padding
    a, d = -torch.rand(4, device=device) - 0.1, torch.rand(4, device=device)
    begins = torch.rand(2, length, device=device) < 0.05 if starts else None
    state = torch.full((2, 4, 16, 32), float("nan"), device=device)
    y = ssd_with_state(x, dt, a, b, c, d, begins, state)
    wrong = [] if torch.equal(y, ssd_forward(x, dt, a, b, c, d, begins)) else ["y differs"]
    if begins is not None:  # nothing before the last start reaches the state
        dt = dt * (begins.flip(1).cumsum(1).flip(1) - begins.int() == 0)[..., None]
    exact = final_state(x.double(), dt.double(), a.double(), b.double())
    return wrong + _wrong("state", state, exact, 2 * HALF_BIT[dtype])


def norm_errors(shape: tuple[int, ...], residual: torch.dtype, out: torch.dtype, device: str) -> list[str]:
    """Errors beyond rounding in a norm; sums must have the bits of PyTorch."""
    torch.manual_seed(0)
    x, branch = (torch.randn(shape, device=device).to(dtype) for dtype in (residual, out))
    weight, wrong = torch.rand(shape[-1], device=device) + 0.5, list[str]()
    for added in (None, branch):
        total, got = add_norm(x, added, weight, 1e-5, out, fused=True)
        expected, exact = add_norm(x, added, weight, 1e-5, torch.float64, fused=False)
        wrong += [] if torch.equal(total, expected) else [f"sum with {added is not None} differs"]
        wrong += _wrong(f"norm of {residual} to {out}", got, exact, HALF_BIT[out])
    return wrong


def _wrong(name: str, got: Tensor, exact: Tensor, half: float) -> list[str]:
    allowed = (ROUNDINGS * EPS + half) * rms(exact)
    error = rms(got.double() - exact.double())
    if error <= allowed and got.isfinite().all():
        return []
    return [f"{name}: error {error:.3g}, allowed {allowed:.3g}, size {rms(exact):.3g}"]


def main() -> int:
    """Check every small case and return the number of failures."""
    checks: list[tuple[object, Callable[[], list[str]]]] = [
        (case, lambda case=case: step_errors(case, "cpu", torch.float32)) for case in STEPS
    ]
    checks += [
        (shape, lambda shape=shape: norm_errors(shape, torch.float32, torch.float32, "cpu"))
        for shape in ((3, 1, 48), (2, 5, 64), (1, 1))
    ]
    checks += [
        (("state", length, on), lambda length=length, on=on: state_errors(length, on, "cpu", torch.float32))
        for length in (5, 70)
        for on in (False, True)
    ]
    return failures(checks)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    sys.exit(main())
