"""The embedding, with a gradient that is summed in FP32 whatever the dtype of the table."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class _Rows(torch.autograd.Function):
    """Rows of a table. A frequent token adds up thousands of gradients, too many for a BF16 sum."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.num_rows = len(table)
        return F.embedding(tokens, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        return None, torch.ops.aten.embedding_dense_backward(grad.float(), tokens, ctx.num_rows, -1, False)


class Embedding(nn.Embedding):
    """nn.Embedding whose gradient is FP32."""

    def forward(self, input: Tensor) -> Tensor:
        """input: [..] int64 -> [.., D] in the table's dtype."""
        return _Rows.apply(input, self.weight)
