"""torchao, live: MX formats and scale layout to the byte; NVFP4, and where its rule is another one."""

import pytest
import torch

from fourbits.formats.codes import encode
from fourbits.formats.descriptors import E2M1
from fourbits.formats.packing import swizzle_scales
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.quant.reference.hadamard import transformed
from support.adversarial import FINITE
from support.peer_inputs import differences, peer, rows

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

MX = {"mxfp4": "float4_e2m1fn_x2", "mxfp8": "float8_e4m3fn", "mxfp8-e5m2": "float8_e5m2"}
TE16 = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def nvfp4(x, amax=None):
    """(codes, scales) by torchao."""
    module = peer("torchao.prototype.mx_formats.nvfp4_tensor")
    scale = module.per_tensor_amax_to_scale(x.abs().max().float() if amax is None else amax)
    scales, codes = module.nvfp4_quantize(x, 16, scale)
    return codes, scales


@pytest.mark.parametrize(("mode", "rule"), [("FLOOR", "max"), ("RCEIL", "ceil")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MX)
def test_mx_bytes_are_equal(name, dtype, mode, rule):
    module = peer("torchao.prototype.mx_formats.mx_tensor")
    modes = peer("torchao.prototype.mx_formats.config").ScaleCalculationMode
    x = rows(dtype)
    scales, codes = module.to_mx(x, getattr(torch, MX[name]), 32, getattr(modes, mode))
    q = quantize(x, OperandSpec(format=name, scale_rule=rule))
    assert differences(q, codes, scales) == (0, 0)


def test_e2m1_codes_are_equal_within_its_range():
    kernels = peer("torchao.prototype.mx_formats.kernels")
    x = torch.cat([FINITE["ties"]((64, 64), 1), FINITE["normal"]((64, 64), 2).clamp(-6, 6)])
    assert torch.equal(kernels.f32_to_f4_unpacked(x), encode(x, E2M1))


@pytest.mark.parametrize("shape", [(200, 9), (128, 4), (1, 1), (300, 64)])
def test_the_scale_layout_of_tensor_cores_is_equal(shape):
    utils = peer("torchao.prototype.mx_formats.utils")
    scales = torch.randint(0, 256, shape).to(torch.uint8)
    assert torch.equal(swizzle_scales(scales), utils.to_blocked(scales).view(torch.uint8).flatten())


def test_the_rotation_is_equal_on_gaussian_input():
    utils = peer("torchao.prototype.moe_training.nvfp4_training.hadamard_utils")
    matrix = utils.get_rht_matrix(TE16, torch.device("cpu"), torch.bfloat16, 16)
    x = FINITE["normal"]((256, 1024), 3).bfloat16()
    theirs = (x.float().view(-1, 16) @ matrix.float()).view(x.shape).bfloat16()
    ours = transformed(x, OperandSpec(rht=16), 1, None)
    assert torch.equal(ours.bfloat16(), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_differs_by_its_order_of_divisions_only(dtype):
    """amax/6/S against amax * (S_enc/6): a scale at a tie moves by one code; a code at a tie, too."""
    x = rows(dtype)
    q = quantize(x, OperandSpec())
    codes, scales = nvfp4(x)
    steps = (
        scales.view(torch.uint8).reshape(q.block_scale.shape).int() - q.block_scale.view(torch.uint8).int()
    )
    assert steps.abs().max() <= 1
    code_bytes, scale_bytes = differences(q, codes, scales)
    # Recorded on 590k blocks: 0.11 % of scales and 0.05 % of codes; ten times that is another rule.
    assert scale_bytes <= 0.011 * q.block_scale.numel()
    assert code_bytes <= 0.01 * q.codes.numel()


def test_small_blocks_keep_their_scale_here_and_get_the_least_normal_one_there():
    """Subnormal scales, codes 1 to 7, are numbers like any other; torchao lifts them to 8."""
    x = torch.ones(2, 16)
    x[1] = 2.0**-17
    ours, theirs = quantize(x, OperandSpec()).block_scale, nvfp4(x)[1]
    assert ours.view(torch.uint8)[1].item() < 8
    assert theirs.view(torch.uint8).flatten()[1].item() == 8


def test_a_zero_tensor_is_zero_here_and_nan_there():
    x = torch.zeros(2, 16)
    q = quantize(x, OperandSpec())
    assert q.dequantize().eq(0).all()
    assert set(nvfp4(x)[1].view(torch.uint8).flatten().tolist()) <= {0x7F, 0xFF}
