"""Speed of the SSD scan and of its peers at the presets' shapes, forward, and forward with backward."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fourbits.bench.peers.ssd import refuse_wrong, ssd_peers
from fourbits.bench.timing import Measurements, Result, copy_bandwidth, measured, medians, product_rate
from fourbits.model.config import ModelConfig
from fourbits.model.ops.self_check import use_kernels
from fourbits.model.ops.ssd.op import ssd
from fourbits.model.presets import MODEL_PRESETS

_TOKENS = {"hybrid-12b": (1, 8192), "nemotron-nano-12b-v2": (1, 8192), "hybrid-1.2b": (2, 8192)}
_CPU_TOKENS = {"tiny": (1, 2048)}
_GOALS = {"mamba_ssm": 1.0}
#: (x, dt, a, b, c, d) -> y
Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def bench_ssd(
    device: torch.device,
    log: Callable[[str], None] = lambda line: None,
    preset: str | None = None,
    compiled: bool = True,
) -> Measurements:
    """Time the scan forward, and forward with backward, at each preset's shape, alternating with each peer.

    log: receives a line per result. preset: measure only its shape. compiled: whether the compiled PyTorch
    version is a peer. Raises ValueError for a preset without a shape here.
    """
    cases = _TOKENS if device.type == "cuda" else _CPU_TOKENS
    if preset is not None and preset not in cases:
        raise ValueError(
            f"--preset: must be one of {', '.join(cases)} on {device.type}, got {preset!r}. Pass one of "
            "these, or omit it for all."
        )
    rates = copy_bandwidth(device), product_rate(device)
    results: list[Result] = []
    for name in cases if preset is None else (preset,):
        for result in _results(name, cases[name], device, rates, log, compiled):
            log(f"{result.name}: {result.seconds * 1e3:.3f} ms, {result.value:.2f} {result.unit}")
            results.append(result)
    return measured("ssd", device, tuple(results), rates)


def _results(
    preset: str,
    shape: tuple[int, int],
    device: torch.device,
    rates: tuple[float, float],
    log: Callable[[str], None],
    compiled: bool,
) -> Iterator[Result]:
    config = MODEL_PRESETS[preset]
    args, dy = scan_arguments(config, shape, device)
    fused = use_kernels(device, args[0].dtype, config.mamba_head_dim, config.state_size)

    def own(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return ssd(x, dt, a, b, c, d, config.chunk_size, fused=fused)

    def times(run: Callable[..., Callable[[], object]], *scans: Scan) -> list[float]:
        runs = [run(scan, args, dy) for scan in scans]
        return medians(runs, device, repeats=10, cold=True, ahead=device.type == "cuda")

    passes = {f"{preset} {shape[0]}x{shape[1]}, {what}": run for what, run in _PASSES.items()}
    for what, run in passes.items():
        (seconds,) = times(run, own)
        least = _least_seconds(config, args, rates, backward=run is both_passes)
        yield Result(name=what, seconds=seconds, value=least / seconds, unit="of the ceiling", ceiling=1.0)
    for name, peer in ssd_peers(config.chunk_size, args[0].is_cuda, compiled).items():
        log(f"{preset}: compiling or tuning {name}, and comparing it with ours")
        refuse_wrong(name, peer, own, args, dy)
        for what, run in passes.items():
            ours, theirs = times(run, own, peer)
            yield Result(
                name=f"{what}: {name}",
                seconds=theirs,
                value=theirs / ours,
                unit="times as long",
                goal=_GOALS.get(name.split()[0]),
            )


def scan_arguments(
    config: ModelConfig, shape: tuple[int, int], device: torch.device
) -> tuple[tuple[Tensor, ...], Tensor]:
    """x, dt, a, b, c, d, with x, b and c slices of one tensor as in the model, and a gradient of y."""
    heads, head_dim, groups = config.mamba_num_heads, config.mamba_head_dim, config.num_groups
    sizes = (heads * head_dim, groups * config.state_size, groups * config.state_size)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, b, c = torch.randn(*shape, sum(sizes), device=device, dtype=torch.float32).to(dtype).split(sizes, -1)
    x, b, c = x.unflatten(-1, (heads, -1)), b.unflatten(-1, (groups, -1)), c.unflatten(-1, (groups, -1))
    dt = torch.rand(*shape, heads, device=device, dtype=torch.float32) * 0.1
    a = -torch.rand(heads, device=device, dtype=torch.float32) * 15 - 1
    d = torch.rand(heads, device=device, dtype=torch.float32) + 0.5
    return (x, dt, a, b, c, d), torch.randn(x.shape, device=device, dtype=torch.float32).to(dtype)


def _forward(scan: Scan, args: tuple[Tensor, ...], dy: Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return scan(*args)

    return run


def both_passes(scan: Scan, args: tuple[Tensor, ...], dy: Tensor) -> Callable[[], object]:
    """A call that runs a scan forward and backward."""
    leaves = [arg.detach().requires_grad_() for arg in args]
    return lambda: torch.autograd.grad(scan(*leaves), leaves, dy)


_PASSES = {"forward": _forward, "forward and backward": both_passes}


def _least_seconds(
    config: ModelConfig, args: tuple[Tensor, ...], rates: tuple[float, float], backward: bool
) -> float:
    """Lower bound from the bytes of arguments and results, or the recurrence's products, at this run's rates.

    Two products of P x N per token and head forward, four more backward.
    """
    x = args[0]
    moved = sum(arg.numel() * arg.element_size() for arg in args) + x.numel() * x.element_size()
    products = 2 * 2 * x.numel() * config.state_size
    if backward:
        moved, products = 3 * moved, 3 * products
    return max(moved / rates[0], products / rates[1])
