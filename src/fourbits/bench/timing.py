"""Time on a device, and the two rates that bound every op: copy bandwidth and GEMM rate.

All times are medians. On a GPU they are measured between CUDA events. `cold` writes a buffer larger than the
caches before each repetition, so that inputs come from memory. `ahead` makes the GPU wait until the host has
queued the whole repetition, so that the time does not include the host's.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from fourbits.device import probe
from fourbits.model.linear import gemm_operand

#: more than the L2 cache of any GPU
_CACHE_BYTES = 256 << 20
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 128 << 20}
_PRODUCT_SIZE = {"cuda": 8192, "cpu": 2048}
_WARM_UP = 3
#: GPU clock cycles, about ten milliseconds, in which the host queues one repetition
_HEAD_START = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A measured result. `value`: larger is better; `goal`, the target, and `ceiling` are in its unit."""

    name: str
    seconds: float
    value: float
    unit: str
    goal: float | None = None
    #: time in which the host queues the work, a lower bound if the GPU waits for the host; None if not
    #: measured
    host_seconds: float | None = None
    #: the bound from bytes at copy bandwidth and operations at the GEMM rate of this run
    ceiling: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All results of one benchmark, and the machine they were measured on."""

    benchmark: str
    device: str
    torch: str
    triton: str | None
    #: bytes read plus bytes written, per second
    copy_bandwidth: float
    #: operations per second of a BF16 GEMM of 8192^3 (CPU: 2048^3)
    product_rate: float
    results: tuple[Result, ...]

    def to_dict(self) -> dict[str, object]:
        """The results as plain data for JSON, under the key "bars"."""
        return {"bars" if name == "results" else name: value for name, value in asdict(self).items()}


def measured(
    benchmark: str, device: torch.device, results: tuple[Result, ...], rates: tuple[float, float]
) -> Measurements:
    """Results with the machine they were measured on. rates: copy bandwidth and GEMM rate of the same run."""
    described = probe(device)
    return Measurements(
        benchmark=benchmark,
        device=described.name,
        torch=described.torch_version,
        triton=described.triton_version,
        copy_bandwidth=rates[0],
        product_rate=rates[1],
        results=results,
    )


def median_seconds(
    run: Callable[[], object], device: torch.device, repeats: int = 20, cold: bool = True
) -> float:
    """Median time of a call. cold: on a GPU, with caches that hold other data."""
    return medians([run], device, repeats, cold, ahead=True)[0]


def medians(
    runs: Sequence[Callable[[], object]],
    device: torch.device,
    repeats: int = 20,
    cold: bool = False,
    ahead: bool = False,
    warm_up: int = _WARM_UP,
) -> list[float]:
    """Median times of several alternating calls, so that a change of the clock rate affects all of them."""
    for run in runs:
        for _ in range(warm_up):
            run()
    if device.type != "cuda":
        return [
            statistics.median(times)
            for times in zip(*(_host_times(runs) for _ in range(repeats)), strict=True)
        ]
    filler = torch.empty(_CACHE_BYTES if cold else 0, dtype=torch.uint8, device=device)
    wait = _HEAD_START if ahead else 0
    events = [[_events_around(run, filler, wait) for run in runs] for _ in range(repeats)]
    torch.cuda.synchronize(device)
    return [
        statistics.median(start.elapsed_time(end) * 1e-3 for start, end in times)
        for times in zip(*events, strict=True)
    ]


def host_medians(
    runs: Sequence[Callable[[], object]], device: torch.device, repeats: int = 20
) -> list[float]:
    """Median times in which the host queues several alternating calls on an idle GPU."""
    times: list[list[float]] = []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        times.append(_host_times(runs))
    return [statistics.median(of_run) for of_run in zip(*times, strict=True)]


def normal(*shape: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Normal fp32 numbers, equal in every call, from a separate generator."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator, dtype=torch.float32)


def release_memory(device: torch.device) -> None:
    """Return unused memory to the device, and reset its peak statistics."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read plus written per second by a large copy on the device."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    copied = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: copied.copy_(source), device)


def product_rate(device: torch.device) -> float:
    """Operations per second of a large BF16 GEMM of random numbers, computed as in a linear layer."""
    size = _PRODUCT_SIZE[device.type]
    a, b = (normal(size, size, device=device, seed=seed).to(torch.bfloat16) for seed in range(2))
    a, b = gemm_operand(a), gemm_operand(b)
    return 2 * size**3 / median_seconds(lambda: a @ b, device, repeats=10, cold=False)


def _host_times(runs: Sequence[Callable[[], object]]) -> list[float]:
    times: list[float] = []
    for run in runs:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def _events_around(
    run: Callable[[], object], filler: torch.Tensor, wait: int
) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    filler.zero_()
    if wait:
        torch.cuda._sleep(wait)  # pyright: ignore[reportPrivateUsage]
    start.record()
    run()
    end.record()
    return start, end
