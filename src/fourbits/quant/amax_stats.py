"""What an operand's own amax is, and how much of it a given amax saturates. docs/nvfp4.md, section 16."""

from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.quant.cpu.compiled import runner_for
from fourbits.quant.cpu.quantize import source_of
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.blocks import block_view, completed
from fourbits.quant.reference.philox import as_sr_key
from fourbits.quant.reference.scales import encode_scale_of, target_and_kappa

#: largest values that still round to the largest element, where a block of the whole tensor counts elements
_ELEMENT_LIMITS = {"e4m3": 464.0, "e5m2": 61440.0, "int8": 127.5}
#: block scales rounded to nearest stay on their grid up to half a step above 448
_SCALE_LIMIT = 464.0


class OwnAmax(NamedTuple):
    """An operand under an amax policy."""

    #: fp32 scalar: what to quantize with
    used: Tensor
    #: fp32 scalar: the operand's own
    own: Tensor
    #: int64 [2]: saturated blocks and all blocks; elements for a block of the whole tensor
    counts: Tensor


def own_amax(x: Tensor, spec: OperandSpec, axis: int, given: Tensor, sr_key: Tensor | None) -> OwnAmax:
    """Measure an operand before it is quantized. x, spec, axis and sr_key as for `quantize`; axis 0 or 1.

    given: fp32 scalar, the amax to use; negative to use the operand's own.
    """
    blocks = block_view(completed(prepared(x, spec, axis, sr_key), spec, axis), spec, axis)
    return OwnAmax(*runner_for(x)(_measured)(blocks, given, spec.for_scales()))


def prepared(x: Tensor, spec: OperandSpec, axis: int, sr_key: Tensor | None) -> Tensor:
    """What is quantized, in x's layout: its source, padded along axis, transformed. As for `own_amax`."""
    return source_of(x, spec, axis, None if sr_key is None else as_sr_key(sr_key), runner_for(x))


def _measured(blocks: Tensor, given: Tensor, spec: OperandSpec) -> tuple[Tensor, Tensor, Tensor]:
    block_amax = given.new_zeros((1, 1))
    if blocks.numel():
        block_amax = blocks.abs().amax(dim=(1, 3)).to(torch.float32)
    own = block_amax.amax()
    used = torch.where(given < 0, own, given)
    target, kappa = target_and_kappa(spec)
    encode = encode_scale_of(target, used, spec)
    if spec.block_size is None:
        element = spec.block_format.element
        assert element is not None
        saturated = blocks.to(torch.float32).abs() * encode > _ELEMENT_LIMITS[element.name]
    else:
        saturated = block_amax * (encode * kappa) > _SCALE_LIMIT
    total = torch.full((), saturated.numel() if blocks.numel() else 0, device=given.device)
    return used, own, torch.stack((saturated.sum(), total))
