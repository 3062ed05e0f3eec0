"""The collectives between ranks in a call, from PyTorch's profiler: number, bytes, device time.

The profiler records every collective with the shapes and dtypes of its tensors. Nothing is computed from the
model: a weight that is not gathered is not counted.
"""

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

#: collectives of FSDP2 -> operators that the profiler records, and part of the name of their NCCL kernels
KINDS = {
    "all_gather": ("c10d::_allgather_base_", "allgather"),
    "reduce_scatter": ("c10d::_reduce_scatter_base_", "reducescatter"),
}
#: the profiler's name of a dtype -> bytes
_SIZES = {
    "double": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "unsigned char": 1,
    "signed char": 1,
    "c10::Float8_e4m3fn": 1,
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one kind in a call, on one rank.

    whole: bytes of the tensors on all ranks together, gathered or not yet reduced; own: of this rank's part.
    whole - own is what a ring sends and receives per rank. device_seconds: time of its kernels on the GPU;
    None without one.
    """

    calls: int
    whole: int
    own: int
    device_seconds: float | None

    @property
    def moved(self) -> int:
        """Bytes that a rank sends, and receives, in a ring."""
        return self.whole - self.own


def traffic_of(call: Callable[[], object], device: torch.device) -> dict[str, Traffic]:
    """The collectives of a call, by kind. The call must have run before; all ranks must take part."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as recorded:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return summarize(events, device.type == "cuda")


def summarize(events: Iterable[Mapping[str, Any]], on_gpu: bool) -> dict[str, Traffic]:
    """The collectives in a profiler's Chrome trace. Raises ValueError for a dtype of unknown size."""
    listed = list(events)
    found: dict[str, Traffic] = {}
    for kind, (operator, kernel) in KINDS.items():
        sizes = [sorted(map(_size, *_tensors(event))) for event in listed if event.get("name") == operator]
        times = [
            event["dur"]
            for event in listed
            if event.get("cat") == "kernel" and kernel in event["name"].lower().replace("_", "")
        ]
        seconds = sum(times) * 1e-6 if on_gpu else None
        found[kind] = Traffic(len(sizes), sum(big for _, big in sizes), sum(own for own, _ in sizes), seconds)
    return found


def _tensors(event: Mapping[str, Any]) -> tuple[list[list[int]], list[str]]:
    """Shapes and dtypes of a collective's two tensors; the larger one belongs to all ranks."""
    return event["args"]["Input Dims"][:2], event["args"]["Input type"][:2]


def _size(shape: list[int], dtype: str) -> int:
    if dtype not in _SIZES:
        raise ValueError(
            f"bench ranks: the profiler names a dtype that has no known size, {dtype!r}. Add it to "
            "fourbits.bench.ranks.collectives."
        )
    return math.prod(shape) * _SIZES[dtype]
