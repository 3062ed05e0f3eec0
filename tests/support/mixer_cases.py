"""The kernels of convolution and gated norm against their definitions in FP64.

Run as a program, it checks small cases in Triton's interpreter:

    TRITON_INTERPRET=1 python -m support.mixer_cases
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional as F

from fourbits.model.mamba2 import mamba_core
from fourbits.model.ops.conv.op import conv_forward, conv_silu
from fourbits.model.ops.errors import value_and_gradients
from fourbits.model.ops.gated_norm.op import gated_group_norm, gated_norm_forward
from support.triton_interpreter import failures

EPS = torch.finfo(torch.float32).eps
HALF_BIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}
NORM_EPS = 1e-5
CONV_NAMES, NORM_NAMES = ("y", "dx", "dtaps", "dbias"), ("out", "dy", "dz", "dweight")
#: FP32 roundings in a result, for a sum of few terms, or of many whose errors have random signs
SUM_ROUNDINGS = 16


@dataclass(frozen=True)
class Conv:
    """Sizes of a convolution, its channels split into widths. ends: share of tokens that end a document."""

    batch: int
    length: int
    widths: tuple[int, ...]
    ends: float = 0.0


@dataclass(frozen=True)
class Norm:
    """Sizes of a gated norm."""

    batch: int
    length: int
    width: int
    groups: int


# Lengths around a program's 32 and 64 tokens, and shorter than the convolution; more channels than its 256.
CONVS = (
    Conv(1, 66, (258, 2)),
    Conv(2, 70, (40,), ends=0.2),
    Conv(1, 129, (8,), ends=0.02),
    Conv(1, 64, (30,)),
    Conv(2, 3, (20, 12), ends=0.3),
    Conv(1, 1, (5,), ends=1.0),
)
NORMS = (Norm(2, 37, 48, 2), Norm(1, 5, 4096, 2), Norm(2, 9, 2560, 2), Norm(1, 1, 16, 1))


def conv_silu_defined(x: Tensor, taps: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
    """SiLU of a sum over the taps, token by token."""
    rows = []
    for token in range(x.shape[1]):
        total = bias.expand(x.shape[0], -1)
        for back in range(min(len(taps), token + 1)):
            term = taps[len(taps) - 1 - back] * x[:, token - back]
            if documents is not None:
                term = term * (documents[:, token] == documents[:, token - back])[:, None]
            total = total + term
        rows.append(total)
    return F.silu(torch.stack(rows, 1))


def gated_norm_defined(y: Tensor, z: Tensor, weight: Tensor, groups: int) -> Tensor:
    """An RMS norm of each group by itself."""
    parts = (y * F.silu(z)).chunk(groups, -1)
    return torch.cat([F.rms_norm(part, (part.shape[-1],), eps=NORM_EPS) for part in parts], -1) * weight


def conv_errors(case: Conv, device: str, dtype: torch.dtype) -> list[str]:
    """Errors beyond rounding. x is a slice of a wider and longer tensor; a wider one as in the model."""
    torch.manual_seed(0)
    channels, shape = sum(case.widths), (case.batch, case.length)
    wide = torch.randn(case.batch, case.length + 1, channels + 24).to(dtype)
    taps, bias = torch.randn(4, channels), torch.randn(channels)
    documents = None
    if case.ends:
        documents = (torch.rand(shape) < case.ends).cumsum(1, dtype=torch.int32).to(device)

    def kernel(wide: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        return torch.cat(conv_silu(wide[:, 1:, 8:-16], taps, bias, documents, case.widths, fused=True), -1)

    def exact(wide: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        return conv_silu_defined(wide[:, 1:, 8:-16], taps, bias, documents)

    return _differences(CONV_NAMES, kernel, exact, tuple(t.to(device) for t in (wide, taps, bias)))


def norm_errors(case: Norm, device: str, dtype: torch.dtype) -> list[str]:
    """Errors beyond rounding. z is a slice of a wider and longer tensor; a wider one as in the model."""
    torch.manual_seed(0)
    shape = (case.batch, case.length)
    y = torch.randn(*shape, case.width).to(dtype)
    wide = torch.randn(case.batch, case.length + 1, case.width + 40).to(dtype)

    def z_of(wide: Tensor) -> Tensor:
        return wide[:, 1:, : case.width]

    def kernel(y: Tensor, wide: Tensor, weight: Tensor) -> Tensor:
        return gated_group_norm(y, z_of(wide), weight, case.groups, NORM_EPS, fused=True)

    def exact(y: Tensor, wide: Tensor, weight: Tensor) -> Tensor:
        return gated_norm_defined(y, z_of(wide), weight, case.groups)

    return _differences(
        NORM_NAMES, kernel, exact, tuple(t.to(device) for t in (y, wide, torch.randn(case.width)))
    )


def transposed_errors() -> list[str]:
    """Errors with unit stride along tokens instead of channels, and other arguments not contiguous."""
    torch.manual_seed(0)
    x, z, taps, column = (torch.randn(shape) for shape in ((2, 12, 9), (2, 12, 9), (12, 4), (12, 2)))
    documents = (torch.rand(9, 2) < 0.3).cumsum(0, dtype=torch.int32).t()

    def conv(fused: bool) -> Callable[..., Tensor]:
        return lambda x, taps, bias: conv_silu(x.mT, taps.t(), bias[:, 0], documents, (12,), fused)[0].mT

    def norm(fused: bool) -> Callable[..., Tensor]:
        return lambda y, z, gain: gated_group_norm(y.mT, z.mT, gain[:, 0], 2, NORM_EPS, fused).mT

    wrong = _differences(CONV_NAMES, conv(True), conv(False), (x, taps, column))
    return wrong + _differences(NORM_NAMES, norm(True), norm(False), (x, z, column))


def core_errors(documents: bool) -> list[str]:
    """Differences between the mixer's core by kernels and in PyTorch, in FP32."""
    torch.manual_seed(0)
    heads, head_dim, groups, states, shape = 4, 16, 2, 16, (2, 41)
    inner, channels = heads * head_dim, heads * head_dim + 2 * groups * states
    sizes = ((*shape, inner + channels + heads), (4, channels), (channels,), (heads,), (heads,), (heads,))
    numbers = (torch.rand(shape) < 0.1).cumsum(1, dtype=torch.int32) if documents else None
    constants = {"num_groups": groups, "chunk_size": 8, "eps": NORM_EPS, "documents": numbers}

    def core(fused: bool) -> Callable[..., Tensor]:
        return lambda *args: mamba_core(*args, **constants, fused=fused)

    names = ("out", "dprojected", "dtaps", "dbias", "ddt_bias", "da_log", "dd", "dnorm_weight")
    return _differences(names, core(True), core(False), tuple(map(torch.randn, (*sizes, (inner,)))))


def operator_errors() -> list[str]:
    """Failures that opcheck reports for the operators and their gradients."""
    torch.manual_seed(0)
    shape, numbers = (2, 5, 8), torch.arange(10, dtype=torch.int32).reshape(2, 5) // 3
    x, z, taps, bias = (torch.randn(s, requires_grad=True) for s in (shape, shape, (4, 8), (8,)))
    calls = (conv_forward, (x, taps, bias, numbers)), (gated_norm_forward, (x, z, bias, 2, NORM_EPS))
    found = [(op, opcheck(op, args, raise_exception=False)) for op, args in calls]
    return [f"{op}: {name}: {r}" for op, results in found for name, r in results.items() if r != "SUCCESS"]


def _differences(
    names: tuple[str, ...],
    kernel: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    args: tuple[Tensor, ...],
) -> list[str]:
    """Each error is at most a few FP32 roundings and half a unit in the last place of the result's dtype."""
    wrong = []
    results = value_and_gradients(kernel, args), value_and_gradients(exact, tuple(a.double() for a in args))
    for name, got, expected in zip(names, *results, strict=True):
        allowed = (SUM_ROUNDINGS * EPS + HALF_BIT[got.dtype]) * rms(expected)
        error = rms(got - expected)
        if not error <= allowed or not got.isfinite().all():
            wrong.append(f"{name}: error {error:.3g}, allowed {allowed:.3g}, size {rms(expected):.3g}")
    return wrong


def rms(x: Tensor) -> float:
    """Root mean square."""
    return x.double().square().mean().sqrt().item()


def main() -> int:
    """Check every small case and return the number of failures."""
    checks: list[tuple[object, Callable[[], list[str]]]] = [
        ("operators", operator_errors),
        ("transposed", transposed_errors),
    ]
    checks += [(case, lambda case=case: conv_errors(case, "cpu", torch.float32)) for case in CONVS]
    checks += [(case, lambda case=case: norm_errors(case, "cpu", torch.float32)) for case in NORMS]
    checks += [(f"core, documents: {on}", lambda on=on: core_errors(on)) for on in (False, True)]
    return failures(checks)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    sys.exit(main())
