"""compressed-tensors, live: it reads our bytes as we do, and quantizes FP32 weights to the same ones."""

import pytest
import torch

from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from support.peer_inputs import differences, peer, rows

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def scheme(name):
    return peer("compressed_tensors.quantization").preset_name_to_scheme(name, ["Linear"])


def nvfp4():
    return peer("compressed_tensors.compressors.nvfp4.base").NVFP4PackedCompressor


def compressed(x):
    """(codes, scales) by its own observer arithmetic and compressor."""
    utils = peer("compressed_tensors.quantization.utils")
    spec = scheme("NVFP4")
    largest = utils.generate_gparam(x.min().reshape(1), x.max().reshape(1))
    blocks = x.view(x.shape[0], -1, 16)
    scale, _ = utils.calculate_qparams(blocks.amin(-1), blocks.amax(-1), spec.weights, global_scale=largest)
    state = {"weight": x, "weight_scale": scale, "weight_global_scale": largest}
    found = nvfp4().compress(state, spec)
    return found["weight_packed"], found["weight_scale"]


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_our_bytes_mean_the_same_there_after_rounding_to_bf16(block):
    """Its global scale is a divisor, applied in another order, so FP32 differs in the last place."""
    q = quantize(rows(torch.float32), OperandSpec(block=block))
    scales = q.block_scale.view(torch.uint8).repeat_interleave(block[0], 0).view(torch.float8_e4m3fn)
    divisor = torch.div(torch.ones(()), q.global_scale).reshape(1)
    state = {"weight_packed": q.codes, "weight_scale": scales, "weight_global_scale": divisor}
    theirs = nvfp4().decompress(state, scheme("NVFP4"))["weight"]
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs, q.dequantize(torch.float32).bfloat16())


def test_mxfp4_bytes_mean_the_same_there():
    module = peer("compressed_tensors.compressors.mxfp4.base")
    q = quantize(rows(torch.float32), OperandSpec(format="mxfp4"))
    state = {"weight_packed": q.codes, "weight_scale": q.block_scale.view(torch.uint8)}
    theirs = module.MXFP4PackedCompressor.decompress(state, scheme("MXFP4"))["weight"]
    assert torch.equal(theirs.float(), q.dequantize(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_get_the_same_scales_and_nearly_the_same_codes(dtype):
    """It divides in the input's dtype; recorded on 590k BF16 blocks: 1.28 % of scales, 0.30 % of codes."""
    x = rows(dtype)
    q = quantize(x, OperandSpec())
    code_bytes, scale_bytes = differences(q, *compressed(x))
    share = 0.03 if dtype == torch.bfloat16 else 0.003
    assert scale_bytes <= share * q.block_scale.numel()
    assert code_bytes <= share * q.codes.numel()


def test_a_zero_block_has_scale_zero_here_and_an_eighth_there():
    x = torch.ones(2, 16)
    x[1] = 0.0
    assert quantize(x, OperandSpec()).block_scale[1].float() == 0
    assert compressed(x)[1][1].float() == 0.125
