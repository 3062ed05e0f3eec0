"""Recorded outputs of other implementations; tests/data/vectors/README.md says whose."""

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

VECTORS = Path(__file__).parents[1] / "data" / "vectors"


@cache
def recorded(name: str) -> dict[str, dict[str, Tensor]]:
    """{case: {field: tensor}} of one file."""
    cases: dict[str, dict[str, Tensor]] = {}
    for key, value in sorted(load_file(VECTORS / f"{name}.safetensors").items()):
        case, _, field = key.partition("/")
        cases.setdefault(case, {})[field] = value
    return cases


def without_negative_zero(packed: Tensor) -> Tensor:
    """Packed E2M1 codes with code 8 (-0.0) read as code 0, which is what the recorded reference writes."""
    low, high = packed & 15, packed >> 4
    return torch.where(low == 8, 0, low) | (torch.where(high == 8, 0, high) << 4)
