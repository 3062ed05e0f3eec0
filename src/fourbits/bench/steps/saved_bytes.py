"""Memory of a training step: its state, and the tensors that the forward pass saves for the backward pass.

Saved tensors are counted as autograd stores them, each storage once. Bytes saved of a linear layer's input
are also counted per layer, so that recipes can be compared on the layers that one of them quantizes.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fourbits.bench.steps.training_step import TrainingStep
from fourbits.linear.module import QuantizedLinear


@dataclass(slots=True)
class SavedBytes:
    """Bytes saved for the backward pass by one forward pass, without parameters and buffers.

    total: bytes of distinct storages; weights: the part of it in quantized weights of linear layers; inputs:
    layer name -> bytes of its saved input, even if other layers save it, too. Layers that share an input save
    it once.
    """

    total: int = 0
    weights: int = 0
    inputs: dict[str, int] = field(default_factory=dict)


class _Counter:
    """Counts every tensor that autograd saves, and tracks which linear layer is running."""

    def __init__(self, model: nn.Module) -> None:
        self.saved = SavedBytes()
        self._own = {_address(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._seen: set[int] = set()
        self._seen_inputs: set[int] = set()
        self._linear: str | None = None
        #: padded shape of the quantized weight that the running layer may still save
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
        # Without detach, a node that saves its own output would keep itself and the whole graph alive.
        tensor = tensor.detach()
        address = _address(tensor)
        if address in self._own or tensor.numel() == 0:
            return tensor
        size = tensor.untyped_storage().nbytes()
        is_weight = tensor.shape == self._weight_shape and tensor.is_floating_point()
        self._weight_shape = None if is_weight else self._weight_shape
        self._alive.append(tensor)  # kept until the forward pass ends, so that no address is reused
        if address not in self._seen:
            self._seen.add(address)
            self.saved.total += size
            self.saved.weights += size if is_weight else 0
        if self._linear is not None and address not in self._seen_inputs and not is_weight:
            self._seen_inputs.add(address)
            self.saved.inputs[self._linear] = self.saved.inputs.get(self._linear, 0) + size
        return tensor


@contextmanager
def _counted(model: nn.Module) -> Generator[_Counter]:
    counter = _Counter(model)
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def enter(module: nn.Linear, _: object, name: str = name) -> None:
                counter.enter(name, module)

            handles.append(module.register_forward_pre_hook(enter))  # pyright: ignore[reportArgumentType]
            handles.append(module.register_forward_hook(lambda *_: counter.leave()))
    try:
        with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda tensor: tensor):
            yield counter
    finally:
        for handle in handles:
            handle.remove()


def saved_bytes(step: TrainingStep) -> SavedBytes:
    """Count up to the head, because the loss saves logits only briefly. The step must have run before."""
    step.begin_step()
    with _counted(step.model) as counter:
        step.model.hidden(step.samples[:, :-1])
    return counter.saved


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBreakdown:
    """Bytes of a training step."""

    parameters: int
    gradients: int
    optimizer: int
    saved_linear_inputs: int
    saved_weights: int
    saved_rest: int
    #: peak of tensors, and the peak minus all of the above: temporaries, logits, cached weights
    peak: int | None
    other: int | None
    #: reserved by the allocator, including CUDA graph pools and fragmentation
    reserved: int | None


def memory_breakdown(step: TrainingStep, saved: SavedBytes) -> MemoryBreakdown:
    """The breakdown of the steps since the peak was reset; peaks are measured on a GPU only."""
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


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
