"""Recorded results of tensor cores; tests/data/vectors/README.md says whose."""

from pathlib import Path

from safetensors import safe_open
from torch import Tensor

#: chip and format -> the instruction
RECORDED = {
    "h100.bf16": "sm_90-bf16",
    "h100.fp16": "sm_90-bf16",
    "h100.e4m3": "sm_90-fp8",
    "h100.e5m2": "sm_90-fp8",
    "h200.bf16": "sm_90-bf16",
    "h200.e4m3": "sm_90-fp8",
    "b200.bf16": "sm_100-bf16",
    "b200.fp16": "sm_100-bf16",
    "a100.bf16": "sm_80-bf16",
    "ada.e4m3": "sm_89-fp8",
    "ada.e5m2": "sm_89-fp8",
}


def recorded(path: Path, name: str) -> tuple[Tensor, ...]:
    """a, b [n, K] in their format, c and d = c + sum of a * b in fp32 [n]."""
    with safe_open(path, framework="pt") as file:
        return tuple(file.get_tensor(f"{name}.{part}") for part in "abcd")
