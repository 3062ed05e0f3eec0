"""The gradients of a micro-batch as a CUDA graph: one launch in place of thousands.

A model of this size keeps a card busy for less time than Python needs to start its kernels, and a quantized
linear starts more of them. A captured micro-batch computes the same bits as an eager one: the same kernels on
the same shapes, with the clock of the random bits in a tensor that is written before each replay.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourbits.linear.checkpoint_state import books_of
from fourbits.linear.step import counters_of

#: optimizer steps before the capture, in which regions and kernels are compiled
_WARM_UP = 1

#: samples [B, T + 1] on the device -> loss; adds to the gradients of the masters
Gradients = Callable[[Tensor], Tensor]


class _Graph(NamedTuple):
    """A captured micro-batch and the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    samples: Tensor
    clocks: list[Tensor]
    loss: Tensor


def why_not_captured(model: nn.Module, device: torch.device) -> str | None:
    """Why the micro-batches of a converted model run eagerly, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "CUDA graphs need an NVIDIA card"
    if books_of(model):
        return "the recipe's amax policies and adaptive layouts decide anew at every step"
    return None


class CapturedGradients:
    """`gradients`, replayed from two graphs: the first micro-batch of a step and a later one.

    The first sets the gradients, the later ones add to them and use the weights as the first quantized them.
    Call `set_step` before each micro-batch, and leave the gradients None after each optimizer step.
    """

    def __init__(self, gradients: Gradients, model: nn.Module, masters: Sequence[nn.Parameter]) -> None:
        self._gradients, self._model, self._masters = gradients, model, masters
        self._graphs: dict[bool, _Graph] = {}
        self._grads: list[Tensor | None] = []
        self._steps = 0

    def __call__(self, samples: Tensor, first: bool) -> Tensor:
        """The loss of a micro-batch, whose gradients are added. first: whether a step begins with it.

        samples: [B, T + 1] on the device, of one shape in all calls.
        """
        self._steps += first
        if self._steps <= _WARM_UP:
            return self._gradients(samples)
        if first not in self._graphs:
            self._graphs[first] = self._captured(samples, first)
        graph, own_samples, own_clocks, loss = self._graphs[first]
        own_samples.copy_(samples)
        for own, clock in zip(own_clocks, counters_of(self._model), strict=True):
            own.copy_(clock)
        graph.replay()
        if first:
            for master, grad in zip(self._masters, self._grads, strict=True):
                master.grad = grad
        return loss

    def _captured(self, samples: Tensor, first: bool) -> _Graph:
        graph, own_samples = torch.cuda.CUDAGraph(), samples.clone()
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        try:
            with torch.cuda.graph(graph, pool=pool):
                loss = self._gradients(own_samples)
        except RuntimeError as error:
            for cause in (error, error.__context__):  # the end of a capture that ran out of memory fails too
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
            raise RuntimeError(
                f"train.cuda_graph: a micro-batch could not be captured as a CUDA graph: {error}. "
                "Let go of losses and activations of earlier passes, whose graphs keep another stream, or "
                "set train.cuda_graph to false to run it kernel by kernel, with the same bits."
            ) from error
        if first:
            self._grads = [master.grad for master in self._masters]
        return _Graph(graph, own_samples, counters_of(self._model), loss)
