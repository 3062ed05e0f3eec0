"""The gradients of a micro-batch as a CUDA graph: one launch in place of thousands.

The kernels of a small model run faster than Python can launch them, and a quantized linear layer launches
more of them. A captured micro-batch computes the same bits as an eager one: the same kernels run on the same
shapes, and the counter of the random bits is a tensor that is written before each replay.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourbits.gemm.sums import without_host
from fourbits.linear.checkpoint_state import recipe_states_of
from fourbits.linear.step import counters_of, tables_of

#: optimizer steps before the capture, during which regions and kernels are compiled
_WARM_UP = 1

#: samples [B, T + 1] on the device -> loss; adds to the gradients of the masters
Gradients = Callable[[Tensor], Tensor]


class _Graph(NamedTuple):
    """A captured micro-batch, and the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    samples: Tensor
    counters: list[Tensor]
    loss: Tensor


def unsupported(model: nn.Module, device: torch.device) -> str | None:
    """Why the micro-batches of a converted model cannot be captured, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "CUDA graphs need an NVIDIA GPU"
    if recipe_states_of(model):
        return "the recipe's amax policies and adaptive layouts make new decisions at every step"
    for table in tables_of(model):
        for gemm in (table.fprop, table.dgrad, table.wgrad):
            if not (gemm.high_precision or without_host(table.sums, gemm.lhs, gemm.rhs, device)):
                return f"sums {table.sums} have no kernel: the host decides which outputs need every term"
    return None


class CapturedGradients:
    """`gradients`, replayed from two graphs: one for the first micro-batch of a step, one for later ones.

    The first micro-batch sets the gradients; later ones add to them and reuse the weights that the first one
    quantized. Call `set_step` before each micro-batch, and set the gradients to None after each optimizer
    step.
    """

    def __init__(self, gradients: Gradients, model: nn.Module, masters: Sequence[nn.Parameter]) -> None:
        self._gradients, self._model, self._masters = gradients, model, masters
        self._graphs: dict[bool, _Graph] = {}
        self._grads: list[Tensor | None] = []
        self._steps = 0

    def __call__(self, samples: Tensor, first: bool) -> Tensor:
        """Add the gradients of a micro-batch and return its loss. first: whether it is the first of its step.

        samples: [B, T + 1] on the device, with the same shape in all calls.
        """
        self._steps += first
        if self._steps <= _WARM_UP:
            return self._gradients(samples)
        if first not in self._graphs:
            self._graphs[first] = self._capture(samples, first)
        graph, captured_samples, captured_counters, loss = self._graphs[first]
        captured_samples.copy_(samples)
        for captured, counter in zip(captured_counters, counters_of(self._model), strict=True):
            captured.copy_(counter)
        graph.replay()
        if first:
            for master, grad in zip(self._masters, self._grads, strict=True):
                master.grad = grad
        return loss

    @property
    def captures_next(self) -> bool:
        """Whether the next step is the one that is captured."""
        return self._steps >= _WARM_UP and not self._graphs

    def _capture(self, samples: Tensor, first: bool) -> _Graph:
        graph, captured_samples = torch.cuda.CUDAGraph(), samples.clone()
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        try:
            with torch.cuda.graph(graph, pool=pool):
                loss = self._gradients(captured_samples)
        except RuntimeError as error:
            for cause in (error, error.__context__):  # when out of memory, ending the capture fails too
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
            raise RuntimeError(
                f"train.cuda_graph: a micro-batch could not be captured as a CUDA graph: {error}. "
                "Delete losses and activations of earlier passes, whose autograd graphs hold another stream, "
                "or set train.cuda_graph to false to run it kernel by kernel, with the same bits."
            ) from error
        if first:
            self._grads = [master.grad for master in self._masters]
        return _Graph(graph, captured_samples, counters_of(self._model), loss)
