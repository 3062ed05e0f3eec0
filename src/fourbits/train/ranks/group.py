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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.tensor import DTensor

from fourbits.linear.packed_shards import own_amaxes
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel
from fourbits.train.background import BackgroundSaver
from fourbits.train.checkpoint import Checkpoint, Tensors, open_tensors
from fourbits.train.parallel import ParallelConfig, mesh_shape
from fourbits.train.ranks.agreement import Agreements
from fourbits.train.ranks.alone import RankRequests, Ranks, StepSums
from fourbits.train.ranks.background_ranks import BackgroundRanks, gathered
from fourbits.train.ranks.gather import Choice, Packed, describe, send_short
from fourbits.train.ranks.gathered_shard import plain
from fourbits.train.ranks.launcher import Place
from fourbits.train.ranks.sharded_checkpoint import load_shards, save_shards
from fourbits.train.ranks.shards import begin_micro_batch, collect_gradients, fill, own_part, shard
from fourbits.train.ranks.watch import Watch

T = TypeVar("T")


class RankGroup(Ranks):
    """One of the processes that a launcher started."""

    def __init__(
        self, place: Place, config: ParallelConfig, store: Any, device: torch.device, watch: Watch
    ) -> None:
        """Join the process group. Raises ValueError for a mesh that does not fit, before anything waits."""
        super().__init__(device, place.rank, place.world)
        self.config, self.store, self.watch = config, store, watch
        self.restarts = place.restarts
        shape = mesh_shape(config, place.world)
        self.reduce = self._reduced
        self._timeout = timedelta(seconds=2 * config.timeout + 60)
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=place.rank,
            world_size=place.world,
            # a last resort: the watch says more
            timeout=self._timeout,
        )
        self.mesh: DeviceMesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        self._shards = self.mesh.get_group("shard")
        self._parameters: dict[str, DTensor] = {}
        self._masters: dict[str, nn.Parameter] = {}
        self._choices: dict[str, Choice] = {}
        self._agreements = Agreements(store, self.is_first)
        #: meshes and process group of saves: none of their own while training waits for them
        self._host_mesh = self.mesh
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

    def share(self, model: LanguageModel, seed: int) -> dict[str, nn.Parameter]:
        """Shard the model, fill it with its initial weights, and return the masters' shards."""
        masters = self.cut(model)
        drawn = fill(self._parameters, masters, model.config, seed, hashed=self.is_first)
        self.initial_weights = drawn
        return masters

    def cut(self, model: LanguageModel) -> dict[str, nn.Parameter]:
        """Shard the model, and return the masters' shards, which have storage without values."""
        if self.config.gather == "packed" and self._shards.size() > 1:  # else nothing travels
            self._choices = send_short(model, self._shards.size(), self._whole)
        shard(model, self.mesh, self.config.gradients, self.config.gather_weights)
        model.to_empty(device=self.device)
        self._parameters = {name: _dtensor(p) for name, p in model.named_parameters()}
        shards = {name: plain(p.to_local().detach()) for name, p in self._parameters.items()}
        self._masters = {name: nn.Parameter(shard) for name, shard in shards.items()}
        return self._masters

    @torch.no_grad()
    def weights_changed(self) -> None:
        """Quantize this rank's shards of the weights that travel so, with the amaxes of all shards.

        One all-reduce for all of them; bits of amaxes have the order of the amaxes, with NaN largest.
        """
        packed = {
            name: each.format for name, each in self._choices.items() if isinstance(each.format, Packed)
        }
        if not packed:
            return
        weights = [format.weight for format in packed.values()]
        shards = [self._masters[name].detach() for name in packed]
        bits = own_amaxes(weights, shards).view(torch.int32)
        dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=self._shards)
        for weight, own, amax in zip(weights, shards, bits.view(torch.float32), strict=True):
            weight.pack(own, amax)

    def notes(self) -> list[str]:
        """How weights travel, for the log."""
        return describe(self._choices)

    @torch.no_grad()
    def _whole(self, name: str) -> Tensor:
        """A whole master. All ranks must call it."""
        shard, shape = self._masters[name].detach(), self._parameters[name].shape
        whole = torch.empty(shape, dtype=shard.dtype, device=shard.device)
        dist.all_gather(list(whole.chunk(self._shards.size())), shard.contiguous(), group=self._shards)
        return whole

    def before_backward(self, model: LanguageModel, last: bool) -> None:
        """Sum gradients over ranks after the last micro-batch only, or after each."""
        begin_micro_batch(model, last or self.config.accumulate == "sharded", last)

    def collect_gradients(self, masters: dict[str, nn.Parameter]) -> None:
        """Hand the shards of the gradients from FSDP2's parameters to the masters."""
        collect_gradients(self._parameters, masters)

    def begin_step(self) -> None:
        """No micro-batch of the step has been added yet."""
        self._losses = []

    def add(self, loss: Tensor) -> None:
        """A micro-batch's share of the mean loss."""
        self._losses.append(loss)

    def sums(self, saturated: Tensor | None, requests: RankRequests) -> StepSums:
        """The sums of the step; losses add up as one process would add them."""
        blocks = torch.zeros(2, device=self.device, dtype=torch.float64)
        blocks = blocks if saturated is None else saturated.double()
        asked = torch.tensor(
            [float(request) for request in requests], device=self.device, dtype=torch.float64
        )
        found = self.all(torch.cat((blocks, asked, torch.stack(self._losses).double())))
        total = torch.zeros((), device=self.device, dtype=torch.float32)
        for loss in found[:, 2 + len(asked) :].flatten().float().unbind():
            total += loss
        counts = None if saturated is None else found[:, :2].sum(0).to(torch.int64)
        return StepSums(total, counts, found[:, 2 : 2 + len(asked)].amax(0).float())

    def norms(self, norms: Tensor) -> Tensor:
        """Norms of whole gradients; squares are summed in FP64, so that the order of ranks hardly matters."""
        squares = norms.double().square()
        dist.all_reduce(squares, group=self._shards)
        return squares.sqrt().float()

    def all(self, values: Tensor) -> Tensor:
        """values: [k] of each rank -> [world, k]. Progress, as all others have come as far."""
        found = torch.empty(self.world, len(values), dtype=values.dtype, device=values.device)
        dist.all_gather(list(found.unbind()), values.contiguous())
        self.progress()
        return found

    def stored(self, name: str, shard: Tensor) -> Tensor:
        """A DTensor of which `shard` is this process's part; scalars are the same everywhere."""
        return self.as_dtensor(name, shard) if shard.dim() else shard

    def as_dtensor(self, name: str, shard: Tensor) -> DTensor:
        """A tensor that is cut like the master of this name."""
        like = self._parameters[name]
        return _like(like, shard, like.device_mesh)

    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor that has the shape of a master."""
        return own_part(self._parameters[name], whole)

    def save(self, folder: Path, step: int, files: Mapping[str, Tensors], state: Mapping[str, Any]) -> None:
        """Write the checkpoint folder/step_N, each rank its shards. All ranks must call it."""
        save_shards(self, folder, step, files, state)

    def gathered(self, value: T) -> list[T]:
        """The plain value of each rank."""
        return gathered(value, self.world, None)

    def saver(self) -> BackgroundSaver:
        """The background saver, with a process group on CPUs of its own."""
        shape = mesh_shape(self.config, self.world)
        if self.device.type != "cpu":
            self._host_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        background = BackgroundRanks(self.store.clone(), self.rank, self.world, self._timeout, self.progress)
        return BackgroundSaver(functools.partial(save_shards, background), self)

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's shard of a DTensor."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def on_host(self, like: Tensor, local: Tensor) -> Tensor:
        """A DTensor whose shard is in the host's memory."""
        return _like(like, local, self._host_mesh) if isinstance(like, DTensor) else local

    def load(self, checkpoint: Checkpoint, name: str, expected: Tensors) -> dict[str, Tensor]:
        """This rank's shards of the tensors of one part, whatever the number of ranks that wrote it."""
        found = load_shards(checkpoint, name, expected)
        if found is not None:
            return found
        stored = open_tensors(checkpoint, name, expected)  # of one process: each rank reads all of it
        return {
            key: own_part(x, stored[key]) if isinstance(x, DTensor) else stored[key]
            for key, x in expected.items()
        }

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

    def progress(self) -> None:
        """This rank has done something that others were waiting for."""
        self.watch.progress()

    def leave(self) -> None:
        """Wait for the others at the end of a run."""
        dist.barrier()
        dist.destroy_process_group()

    def describe(self) -> dict[str, Any]:
        """For manifest.json."""
        replicate, shard = mesh_shape(self.config, self.world)
        return {
            "ranks": self.world,
            "mesh": {"replicate": replicate, "shard": shard},
            "gradients": self.config.gradients,
            "gather": self.config.gather,
            "accumulate": self.config.accumulate,
        }

    def _reduced(self, values: Tensor, how: Literal["max", "sum"]) -> Tensor:
        reduced = values.to(self.device, copy=True)
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
        return reduced.to(values.device)


def _like(like: DTensor, shard: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that is cut like another one, on a mesh of the same shape."""
    return DTensor.from_local(
        shard, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _dtensor(parameter: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor)
    return parameter
