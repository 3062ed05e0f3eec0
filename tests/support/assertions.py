"""Assertions about operands: equal bytes, field by field."""

import torch
from torch import Tensor

from fourbits.quant.tensor import QuantizedTensor


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor, whatever its dtype."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def assert_same_bytes(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Equal shape, dtype and bytes: NaN equals NaN of the same payload, -0.0 differs from 0.0."""
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)} != {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} != {expected.dtype}"
    differ = as_bytes(actual) != as_bytes(expected)
    assert not differ.any(), f"{what}: {int(differ.sum())} of {differ.numel()} bytes differ"


def assert_same_operand(actual: QuantizedTensor, expected: QuantizedTensor) -> None:
    """Equal codes, scales, shape and axis."""
    assert_same_bytes(actual.codes, expected.codes, "codes")
    assert_same_bytes(actual.block_scale, expected.block_scale, "block_scale")
    assert_same_bytes(actual.global_scale, expected.global_scale, "global_scale")
    assert (actual.shape, actual.axis) == (expected.shape, expected.axis)
