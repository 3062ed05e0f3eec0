"""The kernels beside the scan, convolution and gated norm, against their definitions in FP64.

Run as a program it checks small cases in Triton's interpreter:
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

from fourbits.model.conv import conv_forward, conv_silu
from fourbits.model.gated_norm import gated_group_norm, gated_norm_forward
from fourbits.model.kernel_errors import value_and_gradients
from fourbits.model.mamba2 import mamba_core
from support.triton_interpreter import failures

EPS = torch.finfo(torch.float32).eps
HALF_BIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}
NORM_EPS = 1e-5
CONV_NAMES, NORM_NAMES = ("y", "dx", "dtaps", "dbias"), ("out", "dy", "dz", "dweight")
#: FP32 roundings in a result: a sum of few terms, or of many whose errors have random signs; and gradients of
#: decays, small remainders of large sums (test_ssd.py)
OF_SUMS, OF_REMAINDERS = 16, 1024


@dataclass(frozen=True)
class Conv:
    """Sizes of a convolution, its channels cut into widths; ends: the share of tokens that end a document."""

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


# Lengths around a program's 32 and 64 tokens, and shorter than the convolution; channels past its 256.
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
    """What is off by more than rounding. x is a slice of a wider tensor, as in the model, and of a longer."""
    torch.manual_seed(0)
    channels, shape = sum(case.widths), (case.batch, case.length)
    wide = torch.randn(case.batch, case.length + 1, channels + 24).to(dtype)
    taps, bias = torch.randn(4, channels), torch.randn(channels)
    documents = None
    if case.ends:
        documents = (torch.rand(shape) < case.ends).cumsum(1, dtype=torch.int32).to(device)

    def made(wide: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        return torch.cat(conv_silu(wide[:, 1:, 8:-16], taps, bias, documents, case.widths, fused=True), -1)

    def true(wide: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        return conv_silu_defined(wide[:, 1:, 8:-16], taps, bias, documents)

    return _differences(CONV_NAMES, made, true, tuple(t.to(device) for t in (wide, taps, bias)))


def norm_errors(case: Norm, device: str, dtype: torch.dtype) -> list[str]:
    """What is off by more than rounding. z is a slice of a wider tensor, as in the model, and of a longer."""
    torch.manual_seed(0)
    shape = (case.batch, case.length)
    y = torch.randn(*shape, case.width).to(dtype)
    wide = torch.randn(case.batch, case.length + 1, case.width + 40).to(dtype)

    def z_of(wide: Tensor) -> Tensor:
        return wide[:, 1:, : case.width]

    def made(y: Tensor, wide: Tensor, weight: Tensor) -> Tensor:
        return gated_group_norm(y, z_of(wide), weight, case.groups, NORM_EPS, fused=True)

    def true(y: Tensor, wide: Tensor, weight: Tensor) -> Tensor:
        return gated_norm_defined(y, z_of(wide), weight, case.groups)

    return _differences(
        NORM_NAMES, made, true, tuple(t.to(device) for t in (y, wide, torch.randn(case.width)))
    )


def turned_errors() -> list[str]:
    """What is off where tokens, not channels, are side by side, and other arguments have gaps."""
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
    """What is off between the region by kernels and as torch, in FP32."""
    torch.manual_seed(0)
    heads, head_dim, groups, states, shape = 4, 16, 2, 16, (2, 41)
    inner, channels = heads * head_dim, heads * head_dim + 2 * groups * states
    sizes = ((*shape, inner + channels + heads), (4, channels), (channels,), (heads,), (heads,), (heads,))
    numbers = (torch.rand(shape) < 0.1).cumsum(1, dtype=torch.int32) if documents else None
    constants = {"num_groups": groups, "chunk_size": 8, "eps": NORM_EPS, "documents": numbers}

    def core(fused: bool) -> Callable[..., Tensor]:
        return lambda *args: mamba_core(*args, **constants, fused=fused)

    names = ("out", "dprojected", "dtaps", "dbias", "ddt_bias", "da_log", "dd", "dnorm_weight")
    return _differences(
        names, core(True), core(False), tuple(map(torch.randn, (*sizes, (inner,)))), OF_REMAINDERS
    )


def operator_errors() -> list[str]:
    """What opcheck finds wrong with the operators and their gradients."""
    torch.manual_seed(0)
    shape, numbers = (2, 5, 8), torch.arange(10, dtype=torch.int32).reshape(2, 5) // 3
    x, z, taps, bias = (torch.randn(s, requires_grad=True) for s in (shape, shape, (4, 8), (8,)))
    calls = (conv_forward, (x, taps, bias, numbers)), (gated_norm_forward, (x, z, bias, 2, NORM_EPS))
    found = [(op, opcheck(op, args, raise_exception=False)) for op, args in calls]
    return [f"{op}: {name}: {r}" for op, results in found for name, r in results.items() if r != "SUCCESS"]


def _differences(
    names: tuple[str, ...],
    made: Callable[..., Tensor],
    true: Callable[..., Tensor],
    args: tuple[Tensor, ...],
    roundings: int = OF_SUMS,
) -> list[str]:
    """Each result is a few FP32 roundings off at the most, and half a bit of its own dtype."""
    wrong = []
    results = value_and_gradients(made, args), value_and_gradients(true, tuple(a.double() for a in args))
    for name, got, wanted in zip(names, *results, strict=True):
        allowed = (roundings * EPS + HALF_BIT[got.dtype]) * rms(wanted)
        error = rms(got - wanted)
        if not error <= allowed or not got.isfinite().all():
            wrong.append(f"{name}: error {error:.3g}, allowed {allowed:.3g}, size {rms(wanted):.3g}")
    return wrong


def rms(x: Tensor) -> float:
    """Root mean square."""
    return x.double().square().mean().sqrt().item()


def main() -> int:
    """Check every small case; returns how many are wrong."""
    checks: list[tuple[object, Callable[[], list[str]]]] = [
        ("operators", operator_errors),
        ("turned", turned_errors),
    ]
    checks += [(case, lambda case=case: conv_errors(case, "cpu", torch.float32)) for case in CONVS]
    checks += [(case, lambda case=case: norm_errors(case, "cpu", torch.float32)) for case in NORMS]
    checks += [(f"core, documents: {on}", lambda on=on: core_errors(on)) for on in (False, True)]
    return failures(checks)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    sys.exit(main())
