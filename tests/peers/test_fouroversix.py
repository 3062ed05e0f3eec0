"""fouroversix, live: NVFP4 and Four Over Six to the byte, MXFP4 with scales rounded up, and its edges."""

import pytest
import torch

from fourbits.formats.packing import unswizzle_scales
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from support.peer_inputs import differences, peer, rows

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

RULES: dict[str, str] = {
    "static_6": "max",
    "mse": "4over6-mse",
    "mae": "4over6-mae",
    "abs_max": "4over6-max",
}


def by_peer(x, rule, *, square=False, dtype="nvfp4"):
    """(codes, scales) of its PyTorch backend."""
    module = peer("fouroversix")
    config = module.QuantizationConfig(backend="pytorch", scale_rule=rule, block_scale_2d=square, dtype=dtype)
    found = module.quantize_to_fp4(x, config)
    length = 32 if dtype == "mxfp4" else 16
    scales = unswizzle_scales(found.scale_factors.view(torch.uint8), x.shape[0], x.shape[1] // length)
    return found.values, scales[::16].contiguous() if square else scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_bytes_are_equal_but_for_ties_of_errors(rule, square, dtype):
    """Errors are summed in another order, so a block may choose the other scale where both are as good."""
    x = rows(dtype)
    q = quantize(x, OperandSpec(scale_rule=RULES[rule], block=(16, 16) if square else (1, 16)))
    code_bytes, scale_bytes = differences(q, *by_peer(x, rule, square=square))
    if rule in ("static_6", "abs_max"):
        # (amax/6) * S_enc against amax * (S_enc/6): 0.11 % of scales on 590k blocks; ten times is much
        assert scale_bytes <= 0.011 * q.block_scale.numel()
    else:
        # an absolute error is a sum of BF16-sized steps and ties more often than a squared one
        assert scale_bytes <= (1e-3 if rule == "mae" else 1e-4) * q.block_scale.numel()
    per_block = 8 * (16 if square else 1)
    assert code_bytes <= scale_bytes * per_block + 1e-2 * q.codes.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_rounds_its_scales_up_and_agrees_with_ceil(dtype):
    x = rows(dtype)
    q = quantize(x, OperandSpec(format="mxfp4", scale_rule="ceil"))
    assert differences(q, *by_peer(x, "static_6", dtype="mxfp4")) == (0, 0)


def test_negative_zero_keeps_its_sign_here_and_loses_it_there():
    x = torch.full((128, 64), -0.0)
    x[:, ::16] = 6.0
    assert quantize(x, OperandSpec()).codes[0, 1] == 0x88
    assert by_peer(x, "static_6")[0][0, 1] == 0x00


def test_an_underflowed_block_has_saturated_codes_here_and_zeros_there():
    """Both dequantize to zero; te_compat=False gives zeros here, too."""
    x = torch.ones(128, 64)
    x[1] = 2.0**-30
    theirs = by_peer(x, "static_6")[0][1]
    assert theirs.eq(0).all()
    assert quantize(x, OperandSpec()).codes[1].eq(0x77).all()
    assert torch.equal(quantize(x, OperandSpec(te_compat=False)).codes[1], theirs)
