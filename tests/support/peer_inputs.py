"""Shared by the cross-checks with installed peers: the inputs, and the count of bytes that differ."""

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fourbits.quant.tensor import QuantizedTensor
from support.adversarial import generator


def peer(module: str) -> ModuleType:
    """A module of a peer, which `make test-peers` installs into a separate environment."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        return pytest.fail(f"{module} cannot be imported: {error}. `make test-peers` installs the peers.")


def rows(dtype: torch.dtype, shape: tuple[int, int] = (512, 1024)) -> Tensor:
    """Normal numbers with a size per row, a few octaves apart, as activations have."""
    g = generator(17)
    return (torch.randn(shape, generator=g) * torch.exp2(2 * torch.randn((shape[0], 1), generator=g))).to(
        dtype
    )


def differences(q: QuantizedTensor, codes: Tensor, scales: Tensor) -> tuple[int, int]:
    """(code bytes, scale bytes) in which a peer's result differs from ours."""
    code_bytes = codes.contiguous().view(torch.uint8).reshape(q.codes.shape)
    ours = q.block_scale.view(torch.uint8)
    scale_bytes = scales.contiguous().view(torch.uint8).reshape(ours.shape)
    return int((code_bytes != q.codes).sum()), int((scale_bytes != ours).sum())
