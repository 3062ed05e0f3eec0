"""A software model of PyTorch's GEMM on FP4 tensor cores, which reads operands from memory as they do."""

import torch

from fourbits.formats.codes import decode
from fourbits.formats.descriptors import E2M1
from fourbits.formats.packing import unpack_nibbles, unswizzle_scales
from fourbits.gemm.native import matmul as matmul_native


def read_operand(codes, scales, global_scale):
    """Values of rows with the contraction last, as FP4 tensor cores read them from memory."""
    assert codes.dtype == torch.float4_e2m1fn_x2
    assert codes.is_contiguous(), "the contraction must be contiguous"
    codes = unpack_nibbles(codes.view(torch.uint8))
    rows, length = codes.shape
    assert length % 32 == 0
    assert scales.dtype == torch.float8_e4m3fn
    assert scales.numel() == -(-rows // 128) * 128 * -(-length // 64) * 4
    grid = unswizzle_scales(scales, rows, length // 16).to(torch.float32)
    return decode(codes, E2M1) * grid.repeat_interleave(16, 1), global_scale


def model_of_scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, *, output_dtype):
    assert recipe_a == recipe_b == matmul_native._RECIPE
    assert swizzle_a == swizzle_b == matmul_native._SWIZZLE
    left, global_a = read_operand(a, *scale_a)
    right, global_b = read_operand(b.t(), *scale_b)
    assert right.shape[0] % 16 == 0
    return ((left.double() @ right.double().t()).float() * (global_a * global_b)).to(output_dtype)
