"""What torchtitan's Trainer computes on two ranks that share layers, for test_torchtitan.py.

Arguments as for support.two_processes; MASTER_PORT is in the environment.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

RANK, RESULT, WORLD = int(sys.argv[1]), Path(sys.argv[3]), sys.argv[4]
os.environ |= {"RANK": str(RANK), "LOCAL_RANK": str(RANK), "WORLD_SIZE": WORLD, "MASTER_ADDR": "localhost"}

import torch.distributed as dist  # noqa: E402

from fourbits.linear.audit import audit  # noqa: E402
from support import titan  # noqa: E402
from support.titan import FourbitsConverter, FourbitsTrainer  # noqa: E402


def trained() -> tuple[Any, list[float], list[torch.Tensor]]:
    """A trainer after its last step, the losses of micro-batches, and this rank's parts of the weights."""
    config = titan.config(str(RESULT.parent), FourbitsConverter.Config())
    config.parallelism.tensor_parallel_degree = int(WORLD)
    config.parallelism.spmd_backend = "partial_dtensor"
    trainer: Any = FourbitsTrainer.Config.of(config).build()
    losses, step = list[float](), trainer.forward_backward_step

    def noted(**kwargs: Any) -> Any:
        loss = step(**kwargs)
        losses.append(float(loss))
        return loss

    trainer.forward_backward_step = noted
    trainer.train()
    weights: list[Any] = list(trainer.model_parts[0].parameters())
    return trainer, losses, [weight.to_local().detach().clone() for weight in weights]


def main() -> None:
    torch.set_num_threads(1)
    first, losses, weights = trained()
    report = audit(first.model_parts[0])
    first.close()
    if RANK == 0:
        shutil.rmtree(RESULT.parent / "checkpoint" / f"step-{titan.STEPS}")
    dist.barrier()
    second, after, resumed = trained()
    found = {
        "losses": losses,
        "called": len(report.called),
        "bypassed": report.bypassed,
        "resumed steps": len(after) // 2,
        "same bits": all(map(torch.equal, weights, resumed)),
    }
    second.close()
    torch.save(found, RESULT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
