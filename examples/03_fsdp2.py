"""FSDP2 on two processes. Run: torchrun --nproc-per-node 2 examples/03_fsdp2.py"""

import importlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fourbits as fb

NextToken = importlib.import_module("01_plain_loop").NextToken  # a name with a number needs the long form


def main(steps: int = 20) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = NextToken().to(device)

    # Convert first, then shard blocks and the root, never single linears. FSDP2 keeps FP32 master weights and
    # gathers BF16 copies; the bits are those of one process that sees the same tokens.
    summary = fb.convert(model, recipe="nvfp4")
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    tokens = torch.arange(4 * 33, device=device).reshape(4, 33) * 5 % 64  # every token has one successor
    batch = tokens.chunk(world)[rank]
    losses = []
    for step in range(steps):
        fb.set_step(model, step, first_token=rank * batch[:, 1:].numel())
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(summary)
        print(f"loss of rank 0: {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
