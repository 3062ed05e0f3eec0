"""RankGroup: several processes that train one model, on torch.distributed and FSDP2."""

import functools
import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.tensor import DTensor

from fourbits.evaluate import EvaluationRanks
from fourbits.linear.monitor.health import Sampling
from fourbits.linear.packed_shards import own_amaxes
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel
from fourbits.train.background import BackgroundSaver
from fourbits.train.checkpoint import Checkpoint, Tensors, open_tensors
from fourbits.train.optim import master_of
from fourbits.train.parallel import ParallelConfig, mesh_shape, micro_batches
from fourbits.train.ranks.agreement import Agreements
from fourbits.train.ranks.background_ranks import BackgroundRanks, gathered
from fourbits.train.ranks.gather import Choice, Packed, choose_formats, describe
from fourbits.train.ranks.gathered_shard import plain
from fourbits.train.ranks.launcher import LaunchedRank
from fourbits.train.ranks.ranks import RankRequests, Ranks, StepSums
from fourbits.train.ranks.sharded_checkpoint import load_shards, save_shards
from fourbits.train.ranks.sharding import Meshes, Sharding
from fourbits.train.ranks.shards import (
    begin_micro_batch,
    collect_gradients,
    fill,
    free_gathered,
    gathered_parameters,
    shard,
)
from fourbits.train.ranks.splits import Split
from fourbits.train.ranks.tensor_parallel import TensorRanks, split_layers
from fourbits.train.ranks.watchdog import Watchdog
from fourbits.train.ranks.whole_tap import sample_whole

T = TypeVar("T")


class DataRanks:
    """The ranks, where those that share layers count as one."""

    def __init__(self, rank: int, world: int, losses: Callable[[Tensor], Tensor]) -> None:
        self.rank, self.world, self._losses = rank, world, losses

    def all(self, values: Tensor) -> Tensor:
        """Losses [k] of this rank's tokens -> [world, k], of all tokens."""
        return self._losses(values)


class RankGroup(Ranks):
    """One of the processes that a launcher started."""

    def __init__(
        self, place: LaunchedRank, config: ParallelConfig, store: Any, device: torch.device, watch: Watchdog
    ) -> None:
        """Join the process group. Raises ValueError for a mesh that does not fit, before anything waits."""
        super().__init__(device, place.rank, place.world)
        self.config, self.store, self.watch = config, store, watch
        self.restarts = place.restarts
        self.shape = mesh_shape(config, place.world)
        self.data_rank, self.tensor_rank = divmod(place.rank, self.shape.tensor)
        self.data_ranks = self.shape.data
        self.reduce = self._reduced
        self._timeout = timedelta(seconds=2 * config.timeout + 60)
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=place.rank,
            world_size=place.world,
            # a last resort: the watchdog reports more
            timeout=self._timeout,
        )
        self.meshes = Meshes.of(self.shape, device.type)
        #: the ranks of one copy of the model
        self._copy = self.meshes.rest.get_group("shard")
        self._parameters: dict[str, DTensor] = {}
        self._sharding = Sharding(self.meshes, {}, {})
        self._masters: dict[str, nn.Parameter] = {}
        self._choices: dict[str, Choice] = {}
        self._agreements = Agreements(store, self.is_first)
        #: meshes and process group of saves: those of training, unless saves run in the background
        self._host_meshes = self.meshes
        self.group: Any = None
        self._losses: list[Tensor] = []

    @property
    def alone(self) -> bool:
        """Whether no launcher started this process."""
        return False

    def agreed(self, decide: Callable[[], T]) -> T:
        """What rank 0 decides. Others wait, however long it takes, and raise OtherRankError if it failed."""
        return self._agreements.agreed(decide)

    def model(self, config: ModelConfig, seed: int) -> LanguageModel:
        """A model on the meta device."""
        with torch.device("meta"):
            return LanguageModel(config, seed=seed)

    def initialized_masters(self, model: LanguageModel, seed: int) -> dict[str, nn.Parameter]:
        """Shard the model, fill it with its initial weights, and return the masters' shards."""
        masters = self.empty_masters(model)
        drawn = fill(self._sharding, masters, model.config, seed, hashed=self.is_first)
        self.initial_weights = drawn
        return masters

    def empty_masters(self, model: LanguageModel) -> dict[str, nn.Parameter]:
        """Shard the model, and return the masters' shards, which have storage without values."""
        splits: dict[str, Split] = {}
        if self.shape.tensor > 1:
            splits = split_layers(model, self._tensor_ranks())
        if self.config.gather == "packed":
            self._choices = choose_formats(model, self._sharing, self._whole)
        shard(model, self.meshes, self.config)
        self._model = model
        model.to_empty(device=self.device)
        self._parameters = {name: _dtensor(p) for name, p in model.named_parameters()}
        self._sharding = Sharding(self.meshes, self._parameters, splits)
        shards = {name: plain(p.to_local().detach()) for name, p in self._parameters.items()}
        self._masters = {name: nn.Parameter(shard) for name, shard in shards.items()}
        # A parameter that several ranks of a copy hold counts once in norms; these ranks sum its gradients.
        self._replicated = [name for name in self._masters if not self._sharding.in_parts(name)]
        again = set(self._replicated) if self.tensor_rank else set[str]()
        once = [float(name not in again) for name in self._masters]
        self._counted = torch.tensor(once, dtype=torch.float64, device=self.device)
        return self._masters

    @torch.no_grad()
    def weights_changed(self) -> None:
        """Free the gathered weights, and quantize this rank's shards of those that are sent quantized.

        One all-reduce finds the amaxes over all shards; their bits have the order of their values, NaN last.
        """
        free_gathered(self._model)
        packed = {
            name: each.format for name, each in self._choices.items() if isinstance(each.format, Packed)
        }
        if not packed:
            return
        weights = [format.weight for format in packed.values()]
        shards = [self._masters[name].detach() for name in packed]
        bits = own_amaxes(weights, shards).view(torch.int32)
        dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=self._copy)
        for weight, own, amax in zip(weights, shards, bits.view(torch.float32), strict=True):
            weight.pack(own, amax)

    def notes(self) -> list[str]:
        """The formats in which weights are gathered, for the log."""
        return describe(self._choices)

    @torch.no_grad()
    def _whole(self, name: str) -> Tensor:
        """A whole master. All ranks must call it."""
        return self._sharding.whole(name, self._masters[name].detach())

    def before_backward(self, model: LanguageModel, last: bool) -> None:
        """Sum gradients over ranks after the last micro-batch only, or after each."""
        sums = last or self.config.accumulate == "sharded"
        begin_micro_batch(model, sums, last, self.config.reshard)

    def whole(self, model: LanguageModel) -> dict[str, nn.Parameter]:
        """The gathered parameters: gradients reach them before they are summed over ranks."""
        return gathered_parameters(model)

    def collect_gradients(self, masters: dict[str, nn.Parameter]) -> None:
        """Hand the shards of the gradients from FSDP2's parameters to the masters.

        Gradients of parameters that all ranks of a block hold (norms) are summed over their tokens or heads.
        """
        collect_gradients(self._parameters, masters)
        found = [grad for name in self._replicated if (grad := masters[name].grad) is not None]
        if not found:
            return
        total = torch.cat([grad.flatten() for grad in found])
        dist.all_reduce(total, group=self._tensor_ranks().group)
        for grad, summed in zip(found, total.split([grad.numel() for grad in found]), strict=True):
            grad.copy_(summed.view_as(grad))

    def begin_step(self) -> None:
        """No micro-batch of the step has been added yet."""
        self._losses = []

    def add(self, loss: Tensor) -> None:
        """A micro-batch's share of the mean loss."""
        self._losses.append(loss)

    def sums(self, saturated: Tensor | None, requests: RankRequests) -> StepSums:
        """The sums of the step; losses are added in the order of one process."""
        blocks = torch.zeros(2, device=self.device, dtype=torch.float64)
        blocks = blocks if saturated is None else saturated.double()
        asked = torch.tensor(
            [float(request) for request in requests], device=self.device, dtype=torch.float64
        )
        found = self.all(torch.cat((blocks, asked, torch.stack(self._losses).double())))
        total = torch.zeros((), device=self.device, dtype=torch.float32)
        for loss in self._over_tokens(found[:, 2 + len(asked) :]).flatten().unbind():
            total += loss
        counts = None if saturated is None else found[:, :2].sum(0).to(torch.int64)
        return StepSums(total, counts, found[:, 2 : 2 + len(asked)].amax(0).float())

    def norms(self, norms: Tensor) -> Tensor:
        """Norms of whole gradients; squares are summed in FP64, so that the order of ranks hardly matters."""
        squares = norms.double().square() * self._counted
        dist.all_reduce(squares, group=self._copy)
        return squares.sqrt().float()

    def all(self, values: Tensor) -> Tensor:
        """The values of all ranks: [k] of each -> [world, k]. Counts as progress, as all others got here."""
        found = torch.empty(self.world, len(values), dtype=values.dtype, device=values.device)
        dist.all_gather(list(found.unbind()), values.contiguous())
        self.progress()
        return found

    def micro_batches(self, accumulation: int) -> range:
        """The micro-batches of a step that this rank computes. ValueError if they do not divide."""
        return micro_batches(accumulation, self.data_rank, self.data_ranks, self.shape.tensor)

    def check_model(self, model: LanguageModel) -> None:
        """Raises ValueError for a converted model whose layers the ranks of `tensor` cannot share."""
        if self.shape.tensor > 1:
            split_layers(model, self._tensor_ranks())

    def over_data(self) -> EvaluationRanks:
        """The ranks with different micro-batches, where ranks that share layers count as one."""
        return DataRanks(self.data_rank, self.data_ranks, self._losses_of_data)

    def _losses_of_data(self, own: Tensor) -> Tensor:
        return self._over_tokens(self.all(own.double()))

    def _over_tokens(self, parts: Tensor) -> Tensor:
        """FP64 [world, k], losses of each rank's tokens -> FP32 [data ranks, k], those of micro-batches."""
        return parts.view(self.shape.data, self.shape.tensor, -1).sum(1).float()

    def stored(self, name: str, shard: Tensor) -> Tensor:
        """A DTensor of which this process has a part; scalars are equal on all ranks. All must call it."""
        return self._sharding.stored(name, shard) if shard.dim() else shard

    def whole_master(self, name: str, shard: Tensor) -> Tensor:
        """The whole of a tensor that is split like a master, from this rank's part. All must call it."""
        return self._sharding.whole(name, shard)

    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor that has the shape of a master."""
        return self._sharding.own_part(name, whole)

    def whole_samples(self, taken: Sampling) -> None:
        """Make a sample of the layers' health cover whole tensors."""
        if self.shape.tensor > 1:
            sample_whole(taken, self._sharding.split, self._tensor_ranks())

    def save(self, folder: Path, step: int, files: Mapping[str, Tensors], state: Mapping[str, Any]) -> None:
        """Write the checkpoint folder/step_N, each rank its shards. All ranks must call it."""
        save_shards(self, folder, step, files, state)

    def gathered(self, value: T) -> list[T]:
        """The value of each rank, in plain Python values."""
        return gathered(value, self.world, None)

    def saver(self) -> BackgroundSaver:
        """The background saver, with a separate process group on CPUs."""
        if self.device.type != "cpu":
            self._host_meshes = Meshes.of(self.shape, "cpu")
        background = BackgroundRanks(self.store.clone(), self.rank, self.world, self._timeout, self.progress)
        return BackgroundSaver(functools.partial(save_shards, background), self)

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's shard of a DTensor."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def on_host(self, like: Tensor, local: Tensor) -> Tensor:
        """A DTensor whose shard is in the host's memory."""
        if not isinstance(like, DTensor):
            return local
        mesh = self._host_meshes.like(self.meshes, like.device_mesh)
        return DTensor.from_local(
            local, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def load(self, checkpoint: Checkpoint, name: str, expected: Tensors) -> dict[str, Tensor]:
        """This rank's shards of the tensors of one part, whatever the number of ranks that wrote it."""
        found = load_shards(checkpoint, name, expected)
        if found is not None:
            return {key: self._own(key, x) for key, x in found.items()}
        stored = open_tensors(checkpoint, name, expected)  # of one process: each rank reads all of it
        return {
            key: self.own_part(self._master_of(key), stored[key]) if isinstance(x, DTensor) else stored[key]
            for key, x in expected.items()
        }

    def _own(self, key: str, stored: Tensor) -> Tensor:
        return self._sharding.own(self._master_of(key), stored) if isinstance(stored, DTensor) else stored

    def _master_of(self, key: str) -> str:
        """The name of the master that a tensor of a checkpoint is, or of which it is a moment."""
        return key if key in self._masters else master_of(key)

    def require_alone(self, what: str, instead: str) -> None:
        """Raises ValueError."""
        raise ValueError(
            f"{what} is for one process, and torchrun started this one, rank {self.rank} of {self.world}. "
            f"Set it to {instead}, or start fourbits without torchrun."
        )

    def first_of(self, found: int | None) -> int | None:
        """The value of the first rank that has one."""
        number = math.nan if found is None else float(found)
        own = torch.tensor([number], dtype=torch.float64, device=self.device)
        every = [value for value in self.all(own).flatten().tolist() if not math.isnan(value)]
        return int(every[0]) if every else None

    def explained(self, error: Exception) -> Exception:
        """The error, or another that names the ranks whose end caused it."""
        return self.watch.explained(error)

    def progress(self) -> None:
        """Report progress: this rank has done something that others may wait for."""
        self.watch.progress()

    def leave(self) -> None:
        """Wait for the others at the end of a run."""
        dist.barrier()
        dist.destroy_process_group()

    def describe(self) -> dict[str, Any]:
        """The record in manifest.json."""
        return {
            "ranks": self.world,
            "mesh": self.shape._asdict(),
            "gradients": self.config.gradients,
            "gather": self.config.gather,
            "reshard": self.config.reshard,
            "accumulate": self.config.accumulate,
        }

    def _tensor_ranks(self) -> TensorRanks:
        """The ranks that share this one's layers."""
        assert self.meshes.layers is not None
        return TensorRanks(self.meshes.layers.get_group("tensor"), self.tensor_rank, self.shape.tensor)

    def _sharing(self, name: str) -> int:
        """How many ranks FSDP2 splits a parameter over."""
        return (self.meshes.blocks if name.startswith("blocks.") else self.meshes.rest).size(-1)

    def _reduced(self, values: Tensor, how: Literal["max", "sum"]) -> Tensor:
        reduced = values.to(self.device, copy=True)
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
        return reduced.to(values.device)


def _dtensor(parameter: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor)
    return parameter
