"""DistributedDataParallel on two processes. Run: torchrun --nproc-per-node 2 examples/04_ddp.py"""

import importlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fourbits as fb

NextToken = importlib.import_module("01_plain_loop").NextToken  # a name with a number needs the long form


def main(steps: int = 20) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = NextToken().to(device)
    summary = fb.convert(model, recipe="nvfp4")
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    tokens = torch.arange(4 * 33, device=device).reshape(4, 33) * 5 % 64  # every token has one successor
    batch = tokens.chunk(world)[rank]
    losses = []
    for step in range(steps):
        # tokens are numbered over all ranks: each draws noise of its own, and one process would draw the same
        fb.set_step(model, step, first_token=rank * batch[:, 1:].numel())
        loss = replica(batch[:, :-1], batch[:, 1:])
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
