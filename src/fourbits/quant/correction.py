"""Corrections: a part of an operand that is removed before quantizing, and added back to the GEMM in FP32.

An operand T [M, F] of tokens, X or dY, is split into T = R + P(T). R is quantized; what P(T) contributes to a
GEMM is computed from its short form `removed`, such as the mean over tokens. A Hadamard transform needs no
correction, because it cancels in the GEMM (`OperandSpec.rht`). docs/nvfp4.md, section 21.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fourbits.quant import token_mean
from fourbits.quant.autocast import without_autocast


@dataclass(frozen=True, slots=True)
class Correction:
    """How one kind of part is removed and added back; P must be a projection along tokens.

    P(T) = A A^+ T, where A [M, r] depends on M only. Then A^T R = 0, so that both cross terms of Wgrad
    vanish: (R + P(dY))^T (S + P(X)) = R^T S + P(dY)^T P(X).
    """

    #: T [M, F] -> (R fp32 [M, F], contiguous; removed, a new fp32 tensor of any shape, which is saved)
    split: Callable[[Tensor], tuple[Tensor, Tensor]]
    #: (removed of T, weight fp32 [N, F], M) -> P(T) weight^T, fp32, broadcastable to [M, N]; in Fprop, Dgrad
    product: Callable[[Tensor, Tensor, int], Tensor]
    #: (removed of dY, removed of X, M) -> P(dY)^T P(X), fp32 [N, K]; in Wgrad
    outer_product: Callable[[Tensor, Tensor, int], Tensor]


_corrections = {
    "token-mean": Correction(token_mean.split, token_mean.product, token_mean.outer_product),
}


def register_correction(name: str, correction: Correction) -> None:
    """Register a correction under a name, for `OperandSpec.correction`.

    Every process that builds such a spec must register it first. Raises ValueError for an empty name, for
    functions that fail on a small tensor or contradict each other there, and for a name that stands for
    another correction, which plans and compiled graphs may hold.
    """
    if not name:
        raise ValueError("register_correction: name must not be empty, which stands for no correction.")
    _try_out(name, correction)
    if _corrections.setdefault(name, correction) != correction:
        raise ValueError(
            f"register_correction: {name!r} is registered already, for another correction. Choose another "
            "name."
        )


def _try_out(name: str, correction: Correction) -> None:
    """Raises ValueError unless the three functions agree on a small tensor, and remove a projection."""
    rows, columns = 48, 8
    generator = torch.Generator().manual_seed(0)
    x, dy = (
        torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu") for _ in range(2)
    )
    identity = torch.eye(columns, dtype=torch.float32, device="cpu")
    try:
        residual, removed = split_residual(correction, x)
        residual_dy, removed_dy = split_residual(correction, dy)
        part, part_dy = (
            correction.product(each, identity, rows).expand(rows, columns) for each in (removed, removed_dy)
        )
        outer = correction.outer_product(removed_dy, removed, rows)
    except Exception as error:
        raise ValueError(
            f"register_correction: the functions of {name!r} must work on fp32 [{rows}, {columns}], got "
            f"{type(error).__name__}: {error}. The docstring of Correction says what each takes and returns."
        ) from error
    orthogonal = "the residual of a tensor must be orthogonal to the removed part of any other"
    for what, actual, expected in (
        ("split's residual + product must be the tensor", residual + part, x),
        (orthogonal, residual_dy.t() @ part, torch.zeros_like(outer)),
        (orthogonal, part_dy.t() @ residual, torch.zeros_like(outer)),
        ("outer_product must be the product of the removed parts", outer, part_dy.t() @ part),
    ):
        if actual.shape != expected.shape or not torch.allclose(actual, expected, atol=1e-3):
            raise ValueError(
                f"register_correction: {what}, which is not true for {name!r}. Correct the function."
            )


def correction_of(name: str) -> Correction:
    """The correction of a name. Raises ValueError for an unknown one."""
    if message := unknown_correction(name):
        raise ValueError(f"OperandSpec.{message}")
    return _corrections[name]


def unknown_correction(name: str) -> str | None:
    """Why a name is not that of a correction, or None."""
    if not name or name in _corrections:
        return None
    known = ", ".join(_corrections) or "none"
    return (
        f"correction: no correction is called {name!r}. Registered: {known}. Call "
        "fourbits.register_correction first, in every process."
    )


def split_residual(correction: Correction, x: Tensor) -> tuple[Tensor, Tensor]:
    """(R, removed) of x [M, F]. Raises ValueError for a residual of another shape or dtype."""
    with without_autocast(x):
        residual, removed = correction.split(x)
    if residual.shape != x.shape or residual.dtype != torch.float32 or not residual.is_contiguous():
        raise ValueError(
            f"Correction.split: the residual must be contiguous fp32 {list(x.shape)}, got {residual.dtype} "
            f"{list(residual.shape)}. Compute it as x.float() minus the part that is removed."
        )
    return residual, removed
