"""The specification of quantization, in plain torch: readable aloud, bit-exact, on any device.

The same source under torch.compile is the CPU path (`quantize_compiled.py`); the Triton kernels must give
equal bytes. Everything works on blocks: a 4-D view [A / a, a, B / b, b] of a tensor in its own layout, so
that no step transposes. docs/nvfp4.md has the rules.
"""

import torch
from torch import Tensor

from fourbits.formats.codes import encode
from fourbits.formats.rounding import round_nearest, round_stochastic, round_stochastic_32
from fourbits.quant.operand import OperandSpec
from fourbits.quant.scaling import SCALE_RULES, Scales


def measure(blocks: Tensor, spec: OperandSpec, amax: Tensor | None) -> Scales:
    """Scales of every block, [A / a, 1, B / b, 1]. blocks: floats; amax: fp32 scalar, None for the blocks'
    own.
    """
    block_format = spec.block_format
    assert block_format.scale is not None
    if blocks.numel():
        block_amax = blocks.abs().amax(dim=(1, 3), keepdim=True).to(torch.float32)
    else:
        block_amax = blocks.new_zeros((blocks.shape[0], 1, blocks.shape[2], 1), dtype=torch.float32)
    return SCALE_RULES[block_format.scale](
        block_amax, block_amax.amax() if amax is None else amax, block_format
    )


def round_blocks(blocks: Tensor, scales: Scales, spec: OperandSpec, noise: Tensor | None) -> Tensor:
    """Signed elements on the grid, fp32, shape of blocks. noise: random bits, one integer per element, or
    None.
    """
    element = spec.block_format.element
    assert element is not None
    values = blocks.to(torch.float32)
    scaled = values * scales.encode
    if spec.rounding == "rne":
        rounded = round_nearest(scaled, element)
    else:
        assert noise is not None, "stochastic rounding is called with noise"
        round_up = round_stochastic if spec.rounding == "sr" else round_stochastic_32
        rounded = round_up(scaled.abs(), noise, element)
    rounded = torch.where(
        torch.isnan(scales.block_scale), torch.full_like(rounded, element.max_value), rounded
    )
    if not spec.te_compat:
        rounded = torch.where(scales.block_scale == 0, torch.zeros_like(rounded), rounded)
    return torch.copysign(rounded, values)


def exact_values(blocks: Tensor, scales: Scales, spec: OperandSpec, noise: Tensor | None) -> Tensor:
    """Values of an exact operand, bf16: element * block scale, or the bare element where block scales are
    FP32.
    """
    elements = round_blocks(blocks, scales, spec, noise)
    values = elements if spec.block_format.scale == "fp32" else elements * scales.block_scale
    return values.to(torch.bfloat16)


def element_codes(blocks: Tensor, scales: Scales, spec: OperandSpec, noise: Tensor | None) -> Tensor:
    """Codes of the rounded elements, uint8, one per element, shape of blocks."""
    assert spec.block_format.element is not None
    return encode(round_blocks(blocks, scales, spec, noise), spec.block_format.element)
