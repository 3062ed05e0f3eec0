"""FLOP formulas of the operators, for torch.utils.flop_counter: those of the GEMMs, quantized or not.

A counter sees the operators because it is a dispatch mode, under which layers call them. Importing this
module registers the formulas.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from fourbits.linear import ops
from fourbits.linear.stacked import ops as of_experts

assert ops.linear_forward, "importing the module defines the operators"
assert of_experts.experts_forward, "importing the module defines the operators"

Shape = Sequence[int]


@register_flop_formula([torch.ops.fourbits.linear_forward])
def forward_flops(x: Shape, inputs: Any, weight: Shape, *_: Any, **__: Any) -> int:
    """FLOPs of Fprop: [M, K] times [K, N]."""
    return 2 * x[0] * weight[0] * weight[1]


@register_flop_formula([torch.ops.fourbits.linear_backward])
def backward_flops(dy: Shape, x: Shape | None, weight: Shape, *rest: Any, **_: Any) -> int:
    """FLOPs of Dgrad and Wgrad, as far as they are needed."""
    needs: Sequence[bool] = rest[-1]
    return 2 * dy[0] * weight[0] * weight[1] * (bool(needs[0]) + bool(needs[1]))


@register_flop_formula([torch.ops.fourbits.experts_forward])
def experts_forward_flops(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """FLOPs of Fprop: each row, sorted by expert, times one expert's weight."""
    return 2 * x[0] * weight[1] * weight[2]


@register_flop_formula([torch.ops.fourbits.experts_backward])
def experts_backward_flops(dy: Shape, x: Shape | None, weight: Shape, *rest: Any, **_: Any) -> int:
    """FLOPs of Dgrad and Wgrad, as far as they are needed."""
    needs: Sequence[bool] = rest[-1]
    return 2 * dy[0] * weight[1] * weight[2] * (bool(needs[0]) + bool(needs[1]))
