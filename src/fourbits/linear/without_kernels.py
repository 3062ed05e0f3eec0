"""Operands of a conversion for which there is no kernel, so that a GPU is slow: notes for the summary."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fourbits.device import probe
from fourbits.quant.quantize import unsupported_operand
from fourbits.quant.request import OPERAND_ROLES
from fourbits.recipe.recipe import GemmTable


def runs_on_gpu(weights: Iterable[Tensor]) -> bool:
    """Whether weights are on a CUDA device, or may be moved to one, because this machine has one."""
    return any(weight.is_cuda for weight in weights) or torch.device(probe().torch_device).type == "cuda"


def notes_without_kernels(tables: Sequence[GemmTable]) -> list[str]:
    """A line for each reason why operands of these layers are quantized without kernels on a GPU."""
    found: dict[str, Counter[str]] = {}
    for table in tables:
        for role in OPERAND_ROLES:
            spec = table.operand(role)
            reason = unsupported_operand(spec) if spec.block_format.quantized else None
            if reason is not None:
                found.setdefault(reason, Counter())[role] += 1
    return [
        f"slow on a GPU: {', '.join(counts)} of {_layers(max(counts.values()))} by the eager reference, "
        f"with the same bits, because {reason}"
        for reason, counts in found.items()
    ]


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"
