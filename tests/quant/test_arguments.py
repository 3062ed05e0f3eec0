"""Arguments that are none are refused by name before anything is computed."""

from typing import Any

import numpy as np
import pytest
import torch

from fourbits.gemm.matmul import matmul
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize

X = torch.ones(4, 20)
SPEC, SR = OperandSpec(), OperandSpec(rounding="sr")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"x": [[1.0]]}, "x must be a dense tensor, got list"),
        ({"x": np.ones((2, 16), np.float32)}, "x must be a dense tensor, got ndarray"),
        ({"x": X.to_sparse()}, r"x must be a dense tensor, got torch\.sparse_coo"),
        ({"x": X[0]}, r"x must be 2-D, got shape \[20\]"),
        ({"x": X[None]}, r"x must be 2-D, got shape \[1, 4, 20\]"),
        ({"axis": 2}, "axis must be 0 or 1 .*, got 2"),
        ({"axis": 1.0}, r"axis must be 0 or 1 .*, got 1\.0"),
        ({"axis": None}, "axis must be 0 or 1 .*, got None"),
        ({"spec": "nvfp4"}, "spec must be an OperandSpec, got 'nvfp4'"),
        ({"amax": 3.0}, r"amax must be a tensor of one number, got 3\.0\. Write torch\.tensor"),
        ({"amax": torch.ones(2)}, r"amax must be a tensor of one number, got \[2\]"),
        ({"amax": torch.empty(0)}, r"amax must be a tensor of one number, got \[0\]"),
        ({"spec": SR, "sr_key": (1, 2)}, r"sr_key: must be an int64 tensor of shape \[5\].*, got \(1, 2\)"),
        ({"spec": SR, "sr_key": torch.tensor([1, 2, 3])}, r"sr_key: .*, got tensor\(\[1, 2, 3\]\)"),
        ({"spec": SR, "sr_key": torch.tensor([1.0, 2.0])}, r"sr_key: .*, got tensor\(\[1\., 2\.\]\)"),
    ],
)
def test_quantize_says_which_argument_is_wrong(arguments, error):
    call: dict[str, Any] = {"x": X, "spec": SPEC, **arguments}
    with pytest.raises(ValueError, match=error):
        quantize(**call)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"a": X}, "a must be a QuantizedTensor, got Tensor. Quantize it first"),
        ({"b": 3.0}, "b must be a QuantizedTensor, got float"),
        *[
            ({"out_dtype": dtype}, f"out_dtype must be bfloat16, float16 or float32, got {dtype}")
            for dtype in (torch.int8, torch.float64, torch.float8_e4m3fn, None)
        ],
        *[
            ({"bias": torch.ones(shape)}, "bias must have one entry per stored row of b, .4., got")
            for shape in [(), (1,), (5,), (4, 4)]
        ],
    ],
)
def test_matmul_says_which_argument_is_wrong(arguments, error):
    q = quantize(X, SPEC)
    call: dict[str, Any] = {"a": q, "b": q, **arguments}
    with pytest.raises(ValueError, match=error):
        matmul(**call)
