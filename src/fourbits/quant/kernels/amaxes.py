"""The amaxes of operands that are given none, from one read of the tensor."""

from typing import TYPE_CHECKING

from torch import Tensor

from fourbits.quant.kernels.kernel_config import NoiseKey, Plan
from fourbits.quant.kernels.support import Wanted
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.quant.kernels import start_exact as kernels


def amaxes_of(
    x: Tensor,
    wanted: tuple[Wanted | None, Wanted | None],
    plans: tuple[Plan | None, Plan | None],
    key: NoiseKey | None,
) -> tuple[Tensor | None, Tensor | None]:
    """fp32 vectors of maxima for the row and the column plan: those given, the others from one read of x."""
    given = [None if want is None or want.amax is None else want.amax.reshape(-1) for want in wanted]
    row, column = (
        made if made is not None and made.target != 0.0 and have is None else None
        for made, have in zip(plans, given, strict=True)
    )
    if row is None and column is None:
        return given[0], given[1]
    stored = [None if want is None else want.stored for want in wanted]
    parts = kernels.amax_parts(x, row, column, key, (stored[0], stored[1]))
    return given[0] if row is None else parts[0], given[1] if column is None else parts[1]
