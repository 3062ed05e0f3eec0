"""Time on a device, and the two rates that bound everything: of copying and of multiplying.

Medians. On a card times are between its own events; `cold` writes a buffer larger than its caches before each
repetition, so that inputs come from memory, and `ahead` keeps it waiting until the host has queued the whole
repetition, so that the time is the card's alone.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from fourbits.device import probe
from fourbits.model.linear import gemm_operand

#: more than the L2 cache of any card
_CACHE_BYTES = 256 << 20
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 128 << 20}
_PRODUCT_SIZE = {"cuda": 8192, "cpu": 2048}
_WARM_UP = 3
#: clock cycles of a card, about ten milliseconds, in which the host queues one repetition
_HEAD_START = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One measured figure. `value` is a share, larger is better; `goal` and `ceiling` are in its unit."""

    name: str
    seconds: float
    value: float
    unit: str
    goal: float | None = None
    #: what bytes over copy bandwidth and operations over the rate of products would allow in this run
    ceiling: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All bars of one benchmark, and what they were measured on."""

    benchmark: str
    device: str
    torch: str
    triton: str | None
    #: bytes read plus bytes written, per second
    copy_bandwidth: float
    #: operations per second of a BF16 product of 8192^3 (CPU: 2048^3)
    product_rate: float
    bars: tuple[Bar, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)


def measured(
    benchmark: str, device: torch.device, bars: tuple[Bar, ...], rates: tuple[float, float]
) -> Report:
    """A report of bars on a device; rates: copy bandwidth and product rate of the same run."""
    facts = probe(device.type)
    return Report(
        benchmark=benchmark,
        device=facts.name,
        torch=facts.torch_version,
        triton=facts.triton_version,
        copy_bandwidth=rates[0],
        product_rate=rates[1],
        bars=bars,
    )


def median_seconds(
    run: Callable[[], object], device: torch.device, repeats: int = 20, cold: bool = True
) -> float:
    """Median time of a call. cold: on a card, with its caches full of something else."""
    return medians([run], device, repeats, cold, ahead=True)[0]


def medians(
    runs: Sequence[Callable[[], object]],
    device: torch.device,
    repeats: int = 20,
    cold: bool = False,
    ahead: bool = False,
    warm_up: int = _WARM_UP,
) -> list[float]:
    """Median times of several calls taken in turns, so that a change of the clock meets all of them."""
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


def normal(*shape: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Normal numbers, fp32, the same at every call, from a generator of their own."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read plus written per second by a large copy on the device."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source), device)


def product_rate(device: torch.device) -> float:
    """Operations per second of a large BF16 product of random numbers, computed as a linear's is."""
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
