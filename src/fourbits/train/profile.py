"""Where a training step's time goes, and the largest speedup that 4-bit GEMMs could give.

A step is recorded kernel by kernel, with the same kernels that CUDA graphs replay. A kernel is classified by
its name (GEMM, quantization, communication), or else by the region of the model that launched it: in the
forward pass from the profiler's range, in the backward pass from autograd's sequence number of the same call.
All others are counted as "rest".
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: kind -> parts of kernel names, in lower case; the first match wins
_NAMES = {
    "communication": ("nccl",),
    "quantization": (
        *("operands_kernel", "amax_kernel", "packed_kernel", "unpack_", "dequantize_", "transpose_kernel"),
        *(
            "fp8_kernel",
            "stats_kernel",
            "observe_kernel",
            "rotate_kernel",
            "rotation_kernel",
            "tile_map_kernel",
            "feedback_kernel",
        ),
    ),
    "GEMM": (
        *("tma_kernel", "pointer_kernel", "sum_kernel", "grouped_rows_kernel", "grouped_sums_kernel"),
        *("grouped_columns_kernel", "chain_"),
        *("gemm", "nvjet", "cutlass", "xmma"),
    ),
    "attention": ("flash", "fmha", "sdpa", "attention"),
}
#: region or range -> kind
_REGIONS = {"attention_core": "attention", "mamba_core": "SSD", "Optimizer.step": "optimizer"}
KINDS: tuple[str, ...] = ("GEMM", "quantization", "attention", "SSD", "optimizer", "communication", "rest")
#: FP4 GEMM rate over BF16 GEMM rate, from the peaks of a Blackwell B200 (9 and 2.25 PFLOP/s)
FP4_SPEEDUP = 4.0


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Device time of a step by kind, in seconds."""

    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of all kernels of a step."""
        return sum(self.seconds.values())

    def share(self, kind: str) -> float:
        """A kind's share of the total."""
        return self.seconds[kind] / self.total if self.total else 0.0

    def statement(self) -> str:
        """Amdahl's law in words, from this step's share of GEMMs."""
        gemms = self.share("GEMM")
        limit, estimate = 1 / (1 - gemms), 1 / (1 - gemms + gemms / FP4_SPEEDUP)
        return (
            f"GEMMs take {gemms:.0%} of the step's device time. If they were {FP4_SPEEDUP:g} times faster "
            f"(FP4 vs BF16 peak) and everything else unchanged, the step would be {estimate:.2f} times "
            f"faster; if they took no time, {limit:.2f} times."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"seconds": self.seconds, "total": self.total, "statement": self.statement()}


def from_events(use: Callable[[StepProfile], None] | None) -> Callable[[Iterable[Any]], None] | None:
    """A function of a profiler's events: calls `use` with their profile, if a device ran kernels."""
    if use is None:
        return None

    def with_events(events: Iterable[Any]) -> None:
        found = step_profile(events)
        if found.total:
            use(found)

    return with_events


def step_profile(events: Iterable[Any]) -> StepProfile:
    """The profile of a step by the events of a profiler that recorded it."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for kernel, region, microseconds in kernels_by_range(events, tuple(_REGIONS)):
        seconds[kind_of(kernel, region)] += microseconds * 1e-6
    return StepProfile(seconds)


def kind_of(kernel: str, region: str | None) -> str:
    """The kind of a kernel by its name, else by the region that launched it."""
    name = kernel.lower()
    for kind, parts in _NAMES.items():
        if any(part in name for part in parts):
            return kind
    return _REGIONS.get(region or "", "rest")


def kernels_by_range(events: Iterable[Any], ranges: Sequence[str]) -> Iterator[tuple[str, str | None, float]]:
    """(name, range, microseconds) of every kernel; range: the innermost one that launched it, or None.

    events: a profiler's; ranges: prefixes of event names.
    """
    on_host = [event for event in events if event.device_type.name == "CPU"]
    by_number: dict[int, str] = {}
    for event in on_host:
        found = _range_of(event, ranges)
        if found is not None and event.sequence_nr >= 0 and not event.name.startswith("autograd::"):
            by_number[event.sequence_nr] = found
    for event in on_host:
        if event.kernels:
            found = _range_of(event, ranges) or _forward_of(event, by_number)
            for kernel in event.kernels:
                yield kernel.name, found, kernel.duration


def _range_of(event: Any, ranges: Sequence[str]) -> str | None:
    """The innermost known range around an event."""
    while event is not None:
        for name in ranges:
            if event.name.startswith(name):
                return name
        event = event.cpu_parent
    return None


def _forward_of(event: Any, by_number: dict[int, str]) -> str | None:
    """The range of the forward call whose backward pass an event belongs to."""
    while event is not None:
        if event.name.startswith("autograd::engine::evaluate_function"):
            return by_number.get(event.sequence_nr)
        event = event.cpu_parent
    return None
