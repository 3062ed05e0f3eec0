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


class Trainer(FourbitsTrainer):
    """Notes the loss of every micro-batch."""

    def forward_backward_step(self, **kwargs: Any) -> Any:
        loss = super().forward_backward_step(**kwargs)
        vars(self).setdefault("noted", []).append(float(loss))
        return loss


def trained() -> tuple[Any, list[torch.Tensor]]:
    """A trainer after its last step, and this rank's parts of the weights."""
    config = titan.config(str(RESULT.parent), FourbitsConverter.Config())
    config.parallelism.tensor_parallel_degree = int(WORLD)
    config.parallelism.spmd_backend = "partial_dtensor"
    trainer = Trainer(FourbitsTrainer.Config.of(config))
    trainer.train()
    weights: list[Any] = list(trainer.model_parts[0].parameters())
    return trainer, [weight.to_local().detach().clone() for weight in weights]


def main() -> None:
    torch.set_num_threads(1)
    first, weights = trained()
    report = audit(first.model_parts[0])
    first.close()
    if RANK == 0:
        shutil.rmtree(RESULT.parent / "checkpoint" / f"step-{titan.STEPS}")
    dist.barrier()
    second, resumed = trained()
    found = {
        "losses": first.noted,
        "called": len(report.called),
        "bypassed": report.bypassed,
        "resumed steps": len(second.noted) // 2,
        "same bits": all(map(torch.equal, weights, resumed)),
    }
    second.close()
    torch.save(found, RESULT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
