"""Requests to the quantizer: operands of one tensor, their amaxes and their random bits."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fourbits.quant.operand import OperandSpec

#: roles of operands, which select their random bits: the low three bits of a stream
ROLES = ("fprop.lhs", "fprop.rhs", "dgrad.lhs", "dgrad.rhs", "wgrad.lhs", "wgrad.rhs", "update", "signs")
OPERAND_ROLES = ROLES[:6]


class Signature(NamedTuple):
    """The properties of 2-D tensors on which quantizers and GEMMs depend: part of the key of cached ones."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, int]
    strides: tuple[int, int]
    #: whether what is quantized is the tensor times a factor, an fp32 scalar that comes with each call: the
    #: values of an exact operand and its scale
    scaled: bool = False


class OperandRequest(NamedTuple):
    """One operand as far as it is known before its tensor: part of the key of cached quantizers."""

    spec: OperandSpec
    #: the contraction axis, 0 or 1
    axis: int
    #: whether codes and scales are requested, or values ready for a GEMM
    packed: bool = False
    #: `own`: of the tensor itself; `given`: with each call; `stored`: with each call by an amax policy, where
    #: a negative one stands for the tensor's own
    amax: Literal["own", "given", "stored"] = "own"
    #: which entries of a call's counter are (seed, stream, step, first row, first block)
    key_fields: tuple[int, ...] = (0, 1, 2, 3, 4)

    @property
    def draws(self) -> bool:
        """Whether the operand consumes random bits."""
        return draws(self.spec)


class OperandInputs(NamedTuple):
    """The inputs that one call adds to a request."""

    #: int64; its entries `key_fields` are the key of the random bits, with `stream` added to the second
    counter: Tensor | None = None
    stream: int = 0
    #: fp32 scalar, or a vector whose maximum it is
    amax: Tensor | None = None
    #: fp32 scalar, where the signature says `scaled`
    factor: Tensor | None = None
    #: int8 [K, span], read where the spec has error feedback
    coefficients: Tensor | None = None


class StatsTarget(NamedTuple):
    """Where a quantizer records what amax policies need of its operands, one place per operand."""

    #: fp32 [n], negative before
    own_amax: Tensor
    #: int64 [n, 2 or more], zero before: saturated blocks, all blocks
    counts: Tensor
    places: tuple[int, ...]


def signature_of(x: Tensor) -> Signature:
    """The signature of a 2-D tensor."""
    rows, columns = x.shape
    return Signature(x.device, x.dtype, (rows, columns), (x.stride(0), x.stride(1)))


def draws(spec: OperandSpec) -> bool:
    """Whether an operand of this spec consumes random bits: stochastic rounding, or signs that are drawn."""
    return spec.stochastic or bool(spec.rht and spec.signs in ("per-layer", "per-call"))
