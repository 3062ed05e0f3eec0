"""The seam to the fused kernels: the operands of a tensor from one read, without host syncs.

`fused_operands` gives the bits of `exact_operand`, or raises ValueError with the reason; `why_not_fused` says
it beforehand. Nothing here falls back: the caller decides who computes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from fourbits.quant.kernels.amaxes import amaxes_of
from fourbits.quant.kernels.kernel_config import FP8_FORMATS, plan
from fourbits.quant.kernels.launch_packed import fp8_codes, fp8_operand
from fourbits.quant.kernels.support import Wanted, by_axis, checked, noise_key, turns
from fourbits.quant.tensor import ExactOperand
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.quant.kernels import start_exact as kernels


def fused_operands(x: Tensor, wanted: Sequence[Wanted]) -> tuple[ExactOperand, ...]:
    """Exact operands of x in the order of `wanted`, at most one for each axis.

    x: 2-D fp32, bf16 or fp16 on a CUDA device. One read for the amaxes that are not given, one for the
    operands. FP8 operands have float8 values whose contraction axis is contiguous, as FP8 tensor cores want.
    Raises ValueError with the reason where the kernels cannot do it.
    """
    if len(wanted) == 1 and turns(wanted[0]):
        return _turned_back(fused_operands(_turned(x, wanted), [wanted[0]._replace(axis=0)]))
    return _operands(x, wanted, observe=False)[0]


def fused_observed(
    x: Tensor, wanted: Sequence[Wanted], into: tuple[Tensor, Tensor], places: Sequence[int]
) -> tuple[ExactOperand, ...]:
    """`fused_operands`, which also writes what `own_amax` gives of each operand, from the same read.

    into: own amaxes fp32 [n], negative before, and counts int64 [n, 2 or more], zero before; places: for each
    operand wanted, where in them its own belong. Every operand wanted has one scale for the whole tensor.
    """
    if len(wanted) == 1 and turns(wanted[0]):
        found = fused_observed(_turned(x, wanted), [wanted[0]._replace(axis=0)], into, places)
        return _turned_back(found)
    made, seen = _operands(x, wanted, observe=True)
    assert seen is not None
    blocks, at = [0, 0], [-1, -1]
    for want, place in zip(wanted, places, strict=True):
        blocks[1 - want.axis], at[1 - want.axis] = _number_of_blocks(x, want), place
    kernels.notes(seen, (blocks[0], blocks[1]), (at[0], at[1]), into)
    return made


def _turned(x: Tensor, wanted: Sequence[Wanted]) -> Tensor:
    return checked(x, wanted).t().contiguous()


def _turned_back(made: tuple[ExactOperand, ...]) -> tuple[ExactOperand, ...]:
    """Operands of the tensor from those of its turned copy: views."""
    return tuple(ExactOperand(operand.values.t(), operand.scale, 1, operand.spec) for operand in made)


def _number_of_blocks(x: Tensor, want: Wanted) -> int:
    size = want.spec.block_size
    assert size is not None
    padded = -(-x.shape[want.axis] // max(16, want.spec.rht)) * max(16, want.spec.rht)
    return -(-x.shape[1 - want.axis] // size[0]) * -(-padded // size[1])


def _operands(
    x: Tensor, wanted: Sequence[Wanted], observe: bool
) -> "tuple[tuple[ExactOperand, ...], kernels.Observed | None]":
    x = checked(x, wanted)
    if wanted[0].spec.format in FP8_FORMATS:
        return tuple(fp8_operand(q) for q in fp8_codes(x, wanted)), None
    row, column = by_axis(wanted)
    row_plan, column_plan = (None if want is None else plan(want.spec, want.axis) for want in (row, column))
    keys = (noise_key(row), noise_key(column))
    amaxes = amaxes_of(x, (row, column), (row_plan, column_plan), keys[1])
    row_values, column_values, scales, seen = kernels.exact(x, row_plan, column_plan, amaxes, keys, observe)
    made: list[ExactOperand] = []
    for want in wanted:
        values = row_values if want.axis == 1 else column_values
        assert isinstance(values, Tensor)
        made.append(ExactOperand(values, scales[1 - want.axis], want.axis, want.spec))
    return tuple(made), seen
