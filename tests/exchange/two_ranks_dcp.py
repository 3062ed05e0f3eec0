"""Two ranks that write Llamas in DCP folders, each rank its shards: beside the result file."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from support.llamas import megatron, titan
from support.two_processes import write_result


def write(rank):
    """titan: rows over ranks, as FSDP2 cuts; megatron: rows or layers; the rows of the vocabulary are odd."""
    mesh = init_device_mesh("cpu", (2,))
    out = Path(sys.argv[3]).parent
    sharded = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in titan(rows=51).items()}
    optimizer = {"state": {name: {"exp_avg": torch.zeros_like(t)} for name, t in sharded.items()}}
    save({**sharded, "optimizer": optimizer, "train_state": {"step": 3}}, checkpoint_id=out / "titan")
    axes = {1: 0, 2: 0, 3: 1}  # tensor parallelism cuts rows, of all layers
    cut = {name: distribute_tensor(t, mesh, [Shard(axes[t.dim()])]) for name, t in megatron(rows=51).items()}
    save(cut, checkpoint_id=out / "megatron")
    stages = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in megatron(rows=51).items()}
    save(stages, checkpoint_id=out / "stages")
    dist.barrier()
    return True


if __name__ == "__main__":
    write_result(write)
