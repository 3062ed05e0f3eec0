"""What a training step keeps in memory: its state, and what the forward pass saves for the backward pass.

Saved tensors are counted as autograd stores them, each storage once. What a linear saves of its input is also
counted by linear, so that recipes can be compared on the linears that one of them quantizes.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fourbits.bench.training_step import TrainingStep
from fourbits.linear.module import QuantizedLinear


@dataclass(slots=True)
class SavedBytes:
    """Bytes saved for the backward pass by one forward pass, parameters and buffers left out.

    total: of distinct storages; weights: of those, quantized weights that linears keep; inputs: linear ->
    what it saves of its input, whoever else saves that too. Linears that read one tensor save it once.
    """

    total: int = 0
    weights: int = 0
    inputs: dict[str, int] = field(default_factory=dict)


class _Watch:
    """Counts every tensor that autograd packs, and knows which linear is at work."""

    def __init__(self, model: nn.Module) -> None:
        self.saved = SavedBytes()
        self._own = {_place(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._seen: set[int] = set()
        self._seen_inputs: set[int] = set()
        self._linear: str | None = None
        #: of the quantized weight that the linear at work may still save, which has padding to blocks of 16
        self._weight_shape: tuple[int, int] | None = None
        self._alive: list[Tensor] = []

    def enter(self, name: str, linear: nn.Linear) -> None:
        self._linear = name
        rows, columns = linear.weight.shape
        quantized = isinstance(linear, QuantizedLinear)
        self._weight_shape = (rows, -(-columns // 16) * 16) if quantized else None

    def leave(self) -> None:
        self._linear = self._weight_shape = None

    def pack(self, tensor: Tensor) -> Tensor:
        # A node that saves its own output would otherwise hold itself, and with it the whole pass, for ever.
        tensor = tensor.detach()
        place = _place(tensor)
        if place in self._own or tensor.numel() == 0:
            return tensor
        size = tensor.untyped_storage().nbytes()
        is_weight = tensor.shape == self._weight_shape and tensor.is_floating_point()
        self._weight_shape = None if is_weight else self._weight_shape
        self._alive.append(tensor)  # until the forward pass is over, so that no address is used twice
        if place not in self._seen:
            self._seen.add(place)
            self.saved.total += size
            self.saved.weights += size if is_weight else 0
        if self._linear is not None and place not in self._seen_inputs and not is_weight:
            self._seen_inputs.add(place)
            self.saved.inputs[self._linear] = self.saved.inputs.get(self._linear, 0) + size
        return tensor


@contextmanager
def _watched(model: nn.Module) -> Generator[_Watch]:
    watch = _Watch(model)
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def enter(module: nn.Linear, _: object, name: str = name) -> None:
                watch.enter(name, module)

            handles.append(module.register_forward_pre_hook(enter))  # pyright: ignore[reportArgumentType]
            handles.append(module.register_forward_hook(lambda *_: watch.leave()))
    try:
        with torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda tensor: tensor):
            yield watch
    finally:
        for handle in handles:
            handle.remove()


def saved_bytes(step: TrainingStep) -> SavedBytes:
    """Count up to the head, whose logits the loss saves for a moment only. The step has run before."""
    with _watched(step.model) as watch:
        step.model.hidden(step.samples[:, :-1])
    return watch.saved


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBreakdown:
    """Bytes of a training step."""

    parameters: int
    gradients: int
    optimizer: int
    saved_linear_inputs: int
    saved_weights: int
    saved_rest: int
    #: of tensors at the fullest moment, and that less all of the above: temporaries, logits, kept weights
    peak: int | None
    other: int | None
    #: what the allocator took from the card, with pools of CUDA graphs and fragments
    reserved: int | None


def memory_breakdown(step: TrainingStep, saved: SavedBytes) -> MemoryBreakdown:
    """Of steps since the peak was reset, on a card; elsewhere without peaks."""
    parameters = sum(p.numel() * p.element_size() for p in step.masters.values())
    gradients = sum(p.numel() * torch.float32.itemsize for p in step.masters.values())
    optimizer = sum(t.numel() * t.element_size() for t in step.optimizer.state().values())
    inputs = sum(saved.inputs.values())
    peak = reserved = None
    if step.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(step.device)
        reserved = torch.cuda.max_memory_reserved(step.device)
    named = parameters + gradients + optimizer + saved.total
    return MemoryBreakdown(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        saved_linear_inputs=inputs,
        saved_weights=saved.weights,
        saved_rest=saved.total - inputs - saved.weights,
        peak=peak,
        other=None if peak is None else peak - named,
        reserved=reserved,
    )


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
