"""A program for one process or several ranks: the operands of all GEMMs of a run's first step, as hashes.

Arguments: a YAML file, the folder of prepared text, a folder for rank_K.json with the hashes of the rank's
micro-batches in the order of calls.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fourbits.data.config import open_data
from fourbits.linear import compute
from fourbits.train.config import load_config
from fourbits.train.opening import with_vocabulary
from fourbits.train.ranks.join import joined
from fourbits.train.trainer import Trainer


def digest(operand: Any) -> str:
    """Hash of the dequantized codes and of the global scale."""
    parts = (operand.values.contiguous().view(torch.uint8), operand.scale.reshape(1).view(torch.uint8))
    return hashlib.sha256(b"".join(part.cpu().numpy().tobytes() for part in parts)).hexdigest()


def recording(gemm: Callable[..., Any], found: list[str]) -> Callable[..., Any]:
    """`gemm`, whose GEMMs append the hashes of both operands to `found`."""

    def recorded(*args: Any) -> Callable[..., Any]:
        multiply = gemm(*args)

        def multiplied(lhs: Any, rhs: Any, bias: Any) -> Any:
            found.append(digest(lhs) + digest(rhs))
            return multiply(lhs, rhs, bias)

        return multiplied

    return recorded


def main() -> None:
    file, cache, out = map(Path, sys.argv[1:])
    config = load_config(file, {})
    torch.set_num_threads(1)
    calls: list[str] = []
    compute.gemm = recording(compute.gemm, calls)
    with joined(config.parallel, config.train.device) as ranks:
        data = open_data(config.data, cache)
        trainer = Trainer(with_vocabulary(config, data), data, ranks.device, ranks)
        of_micro_batch: dict[str, list[str]] = {}
        gradients = trainer._gradients

        def recorded(samples: torch.Tensor) -> torch.Tensor:
            calls.clear()
            loss = gradients(samples)
            of_micro_batch[str(trainer._own[len(of_micro_batch)])] = list(calls)
            return loss

        trainer._gradients = recorded
        trainer.run_step()
    (out / f"rank_{ranks.rank}.json").write_text(json.dumps(of_micro_batch))


if __name__ == "__main__":
    main()
