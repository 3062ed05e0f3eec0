"""Which implementation computes an operand where no kernel does, and the warning about it."""

import warnings

import pytest
import torch

from fourbits.quant import quantize as dispatch
from fourbits.quant.operand import OperandSpec
from fourbits.quant.request import OperandRequest, Signature

REQUESTS = (OperandRequest(OperandSpec(), 1),)


def on(device: str) -> Signature:
    """A tensor on a device that this machine need not have."""
    return Signature(torch.device(device), torch.bfloat16, (16, 16), (16, 1))


@pytest.mark.parametrize("device", ["xpu", "mps"])
def test_an_accelerator_without_kernels_is_announced_once(device):
    dispatch._warn_of_reference.cache_clear()
    dispatch.quantizer.cache_clear()
    with pytest.warns(UserWarning, match=rf"many times slower, same bits \(.* the tensor is on {device}\)"):
        dispatch.quantizer(on(device), REQUESTS)
    dispatch.quantizer.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.quantizer(on(device), REQUESTS)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cpu_needs_no_kernels_and_prints_nothing(device):
    dispatch.quantizer.cache_clear()
    assert not dispatch.one_pass(on(device), REQUESTS)
    dispatch.quantizer(on(device), REQUESTS)
