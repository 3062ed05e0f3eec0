"""Who makes an operand where no kernel does, and that it is said."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from fourbits.linear import operands
from fourbits.quant.kernels.support import Wanted
from fourbits.quant.operand import OperandSpec

WANTED = (Wanted(OperandSpec(), 1),)


def on(device):
    """What is looked at of a tensor on a device that this machine does not have."""
    return SimpleNamespace(device=torch.device(device), is_cuda=device == "cuda")


@pytest.mark.parametrize("device", ["xpu", "mps"])
def test_an_accelerator_without_kernels_is_announced_once(device):
    operands._announce.cache_clear()
    with pytest.warns(UserWarning, match=rf"many times slower, same bits \(nvfp4: .* x is on {device}\)"):
        assert not operands._is_fused(on(device), WANTED)  # pyright: ignore[reportArgumentType]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not operands._is_fused(on(device), WANTED)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cpu_needs_no_kernels_and_no_words(device):
    assert not operands._is_fused(torch.empty(16, 16, device=device), WANTED)
