"""Ranks: the interface of a run to the processes that train it. Here: a single process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fourbits.evaluate import EvaluationRanks
from fourbits.linear.amax_policy import Reduce
from fourbits.linear.monitor.health import Sampling
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel
from fourbits.train.background import BackgroundSaver
from fourbits.train.checkpoint import Checkpoint, Tensors, load_tensors, save_checkpoint

T = TypeVar("T")


class RankRequests(NamedTuple):
    """Requests to a rank between steps: a signal (its number or 0), its time limit, to save, to record."""

    signal: int = 0
    time_up: bool = False
    save: bool = False
    record: bool = False

    @property
    def stop(self) -> bool:
        """Whether the run should end after this step."""
        return self.time_up or self.signal != 0

    def after(self, earlier: "RankRequests") -> "RankRequests":
        """These, and what `earlier` ones still wait for: a save or a recording is requested only once."""
        return self._replace(save=self.save or earlier.save, record=self.record or earlier.record)


class StepSums(NamedTuple):
    """The sums of a step over its micro-batches, on the device.

    loss: FP32 scalar, the mean over the step's tokens; saturated: int64 [2], saturated and all blocks, or
    None; asked: FP32 [4], the requests of any rank.
    """

    loss: Tensor
    saturated: Tensor | None
    asked: Tensor


class Ranks:
    """A process that trains alone. A subclass is for several ranks, of which rank 0 writes the files."""

    #: for set_step and recipe_state; None: nothing is reduced over ranks
    reduce: Reduce | None = None

    #: how often a launcher has restarted the ranks after one failed
    restarts = 0
    #: SHA-256 of the initial weights, where `initialized_masters` has drawn them
    initial_weights: str | None = None

    def __init__(self, device: torch.device, rank: int = 0, world: int = 1) -> None:
        self.device, self.rank, self.world = device, rank, world
        #: this process's number among those with different micro-batches, and how many there are
        self.data_rank, self.data_ranks = rank, world
        self._loss = torch.zeros((), device=device, dtype=torch.float32)
        self._no_requests = torch.zeros(len(RankRequests()), device=device, dtype=torch.float32)

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether this process trains by itself, started by no launcher, so that nothing is sharded."""
        return True

    def agreed(self, decide: Callable[[], T]) -> T:
        """What rank 0 decides, on every rank; plain JSON values. All ranks must call it in the same order."""
        return decide()

    def model(self, config: ModelConfig, seed: int) -> LanguageModel:
        """A model with initial weights, or one on the meta device that `initialized_masters` will fill."""
        return LanguageModel(config, seed=seed).to(self.device)

    def initialized_masters(self, model: LanguageModel, seed: int) -> dict[str, nn.Parameter]:
        """The masters of a converted model that this process updates, by name, with initial weights."""
        return dict(model.named_parameters())

    def empty_masters(self, model: LanguageModel) -> dict[str, nn.Parameter]:
        """As `initialized_masters`, but the masters get storage without values. model: on the meta device."""
        model.to_empty(device=self.device)
        return dict(model.named_parameters())

    def weights_changed(self) -> None:
        """Weights may have been written since the last forward pass. All ranks must call it."""

    def notes(self) -> list[str]:
        """Lines for the log about the formats in which weights are gathered."""
        return []

    def before_backward(self, model: LanguageModel, last: bool) -> None:
        """A micro-batch begins. last: whether it is this rank's last of the step, completing gradients."""

    def whole(self, model: LanguageModel) -> dict[str, nn.Parameter]:
        """The parameters that a backward pass computes gradients for, by name. All ranks must call it."""
        return dict(model.named_parameters())

    def collect_gradients(self, masters: dict[str, nn.Parameter]) -> None:
        """Give the masters their complete gradients."""

    def begin_step(self) -> None:
        """No micro-batch of the step has been added yet."""
        self._loss = torch.zeros((), device=self.device, dtype=torch.float32)

    def add(self, loss: Tensor) -> None:
        """Add a micro-batch's share of the mean loss; a CUDA graph overwrites the tensor in the next one."""
        self._loss += loss

    def sums(self, saturated: Tensor | None, requests: RankRequests) -> StepSums:
        """The sums of the step over all ranks, its losses in the order of micro-batches."""
        return StepSums(self._loss, saturated, self._no_requests)

    def norms(self, norms: Tensor) -> Tensor:
        """Norms of whole gradients, FP32 [n], from those of this process's shards."""
        return norms

    def all(self, values: Tensor) -> Tensor:
        """The values of all ranks. values: [k] of each -> [world, k]."""
        return values[None]

    def gathered(self, value: T) -> list[T]:
        """The value of each rank, in plain Python values."""
        return [value]

    def micro_batches(self, accumulation: int) -> range:
        """The micro-batches of a step that this process computes. ValueError if they do not divide."""
        return range(accumulation)

    def check_model(self, model: LanguageModel) -> None:
        """Raises ValueError for a converted model on the meta device that several ranks cannot share.

        The model is of no use afterwards.
        """

    def over_data(self) -> EvaluationRanks:
        """The ranks with different micro-batches, for an evaluation of the model in training."""
        return self

    def whole_samples(self, taken: Sampling) -> None:
        """Make a sample of the layers' health cover whole tensors. All ranks take it together."""

    def stored(self, name: str, shard: Tensor) -> Tensor:
        """A master, or a tensor of its shape, as a checkpoint stores it: the whole, or a DTensor."""
        return shard

    def whole_master(self, name: str, shard: Tensor) -> Tensor:
        """The whole of a tensor that is split like a master, from this process's part. All must call it."""
        return shard

    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor that has the shape of a master."""
        return whole

    def save(self, folder: Path, step: int, files: Mapping[str, Tensors], state: Mapping[str, Any]) -> None:
        """Write the checkpoint folder/step_N. Raises what `save_checkpoint` raises."""
        save_checkpoint(folder, step, files, state)

    def saver(self) -> BackgroundSaver:
        """The background saver. All ranks must create it together."""
        return BackgroundSaver(save_checkpoint, self)

    def local(self, tensor: Tensor) -> Tensor:
        """This process's part of a tensor that `stored` returned."""
        return tensor

    def on_host(self, like: Tensor, local: Tensor) -> Tensor:
        """A tensor as `stored` returns it, whose part is in the host's memory."""
        return local

    def load(self, checkpoint: Checkpoint, name: str, expected: Tensors) -> dict[str, Tensor]:
        """This process's shards of the tensors of one part. Raises what `load_tensors` raises."""
        return load_tensors(checkpoint, name, expected)

    def require_alone(self, what: str, instead: str) -> None:
        """Raises ValueError under a launcher, for features that several ranks do not support."""

    def first_of(self, found: int | None) -> int | None:
        """The value of the first rank that has one."""
        return found

    def explained(self, error: Exception) -> Exception:
        """The error, or another that names the ranks whose end caused it."""
        return error

    def progress(self) -> None:
        """Report progress: this process has done something that others may wait for."""

    def leave(self) -> None:
        """Wait for the others at the end of a run."""

    def describe(self) -> dict[str, Any]:
        """The record in manifest.json."""
        return {"ranks": self.world}
