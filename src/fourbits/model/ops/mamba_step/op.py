"""One token of a Mamba-2 mixer between its projections: in PyTorch, or by Triton kernels on a GPU.

In PyTorch every operation reads and writes states, which for a batch are larger than the layer's weights; the
kernels read and write them once.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from fourbits.model.ops.conv.op import KERNEL_TAPS
from fourbits.model.ops.mamba_step import reference
from fourbits.model.ops.mamba_step.weights import StepWeights
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.model.ops.mamba_step.kernels import mamba_step_triton as kernels


def mamba_step(
    projected: Tensor, inputs: Tensor, state: Tensor, begins: Tensor, weights: StepWeights, fused: bool
) -> Tensor:
    """The input of out_proj, [B, H*P]: convolution, state, skip, gate and norm; updates inputs and state.

    projected: one token of each sequence, [B, z | x | B | C | dt], unit stride along the last axis; inputs:
    the last W - 1 inputs of the convolution, [B, W - 1, C], contiguous; state: FP32 [B, H, P, N], contiguous;
    begins: rows whose token begins a document and sees neither, bool [B]. fused: by the kernels if the
    convolution has their KERNEL_TAPS taps; they round to projected's dtype where those of training do: the
    outputs of convolution, scan and norm. Otherwise the result is FP32.
    """
    if fused and inputs.shape[1] == KERNEL_TAPS - 1:
        return kernels.mamba_step(projected, inputs, state, begins, weights)
    return reference.mamba_step(projected, inputs, state, begins, weights)
