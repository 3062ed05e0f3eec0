"""Next-token loss that never holds all logits: head and cross-entropy run over chunks of tokens.

With a vocabulary of 131,072, 32k tokens have 8 GiB of BF16 logits, and as much again of their gradients. So
the forward pass computes a chunk's logits, its loss, and at once the gradients of the chunk's activations and
of the head's parameters, and then frees the logits. The backward pass only multiplies these gradients by the
gradient of the loss, a scalar.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fourbits.model.linear import Linear

IGNORED = -100
# Logits per chunk: 128 MiB in BF16, and as much of their gradients. On a GPU eight times that: every chunk
# also costs passes over the head's gradient, which take as long as its GEMMs if chunks are only 512 tokens
# long for a head of 131,072 x 2048.
CHUNK_LOGITS, GPU_CHUNK_LOGITS = 1 << 26, 1 << 29


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Region: sum of -log softmax(logits)[target] over the tokens whose target is not IGNORED.

    logits: [M, V] of any float dtype; targets: [M] int64 -> FP32 scalar; NaN if a target is outside the
    vocabulary.
    """
    logits = logits.float()
    # A comparison, unlike a gather, fuses, and its gradient needs no scatter.
    chosen = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int64) == targets[:, None]
    picked = torch.where(chosen, logits, 0.0).sum(-1)
    outside = (targets < 0) | (targets >= logits.shape[-1])
    losses = torch.where(outside, torch.nan, logits.logsumexp(-1) - picked)
    return torch.where(targets == IGNORED, 0.0, losses).sum()


def chunk_limit(device: torch.device) -> int:
    """The largest number of logits per chunk on this device."""
    return GPU_CHUNK_LOGITS if device.type == "cuda" else CHUNK_LOGITS


def chunk_length(num_tokens: int, vocab_size: int, limit: int) -> int:
    """Tokens per chunk so that a chunk has at most `limit` logits."""
    fewest = max(1, -(-num_tokens * vocab_size // limit))
    # Chunks of equal length compile once: use up to twice as many chunks if that makes them equal.
    equal = next((count for count in range(fewest, 2 * fewest) if num_tokens % count == 0), fewest)
    return -(-num_tokens // equal)


LossOf = Callable[[Tensor, Tensor], Tensor]


def chunked_loss(loss_of: LossOf, head: nn.Module, hidden: Tensor, targets: Tensor, length: int) -> Tensor:
    """Sum of loss_of(hidden[i : i + length], targets[i : i + length]) with the memory of one chunk.

    loss_of calls `head`, whose parameters receive their gradients. hidden: [M, D]; targets: [M] -> FP32
    scalar.
    """
    with head.rounded_once(hidden.dtype) if isinstance(head, Linear) else nullcontext():
        if torch.is_grad_enabled():
            parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
            return _ChunkedLoss.apply(loss_of, length, targets, hidden, *parameters)
        total = torch.zeros((), device=hidden.device, dtype=torch.float32)
        for rows, expected in zip(hidden.split(length), targets.split(length), strict=True):
            total += loss_of(rows, expected)
        return total


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss_of: LossOf, length: int, targets: Tensor, hidden: Tensor, *parameters: Tensor
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device, dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        grads: list[Tensor] = []
        for start in range(0, len(hidden), length):
            chunk = slice(start, start + length)
            with torch.enable_grad():
                rows = hidden[chunk].detach().requires_grad_()
                loss = loss_of(rows, targets[chunk])
                grad_hidden[chunk], *added = torch.autograd.grad(loss, [rows, *parameters])
            grads = [g.add_(more) for g, more in zip(grads, added, strict=True)] if grads else added
            total += loss.detach()
        ctx.grads = [grad_hidden, *grads]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("The chunked loss frees its gradients in backward: call backward only once.")
        grads, ctx.grads = ctx.grads, None
        return None, None, None, *(g.mul_(grad) for g in grads)
