"""Speed of transformers' Llama, converted in one line and trained in a plain loop, as users do.

FP32 master weights, BF16 autocast, fused AdamW, random tokens; no CUDA graphs except those of torch.compile.
Each nvfp4 step is compared with the BF16 step of the same model and mode, measured in the same call.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fourbits.bench.linear import with_delayed_amax
from fourbits.bench.timing import Measurements, Result, copy_bandwidth, measured, product_rate, release_memory
from fourbits.data.optional import load_transformers
from fourbits.device import probe
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe

SUPPLIED = "nvfp4, amax supplied"
MODES = ("eager", "compile", "reduce-overhead")
_UNIT = "of BF16"
#: goal for the first step under torch.compile: at most twice as long as BF16's
_COMPILATION = 0.5
#: goal for peak memory with packed inputs: BF16's peak divided by it
_PACKED_MEMORY = 1 / 0.95
_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class HfSize:
    """A Llama and its batch. goals: speed of nvfp4 vs BF16 by mode on an H100; h200: where these differ."""

    width: int
    layers: int
    batch: int
    tokens: int
    vocabulary: int = 32000
    goals: tuple[float | None, ...] = (None,) * len(MODES)
    h200: tuple[float | None, ...] | None = None
    #: whether peak memory with packed inputs is measured, under torch.compile
    packed: bool = False
    #: eager nvfp4 over BF16 with every amax supplied, as if the tensor's producer had computed it
    supplied_goal: float | None = None

    @property
    def name(self) -> str:
        """Width x layers, batch x tokens."""
        return f"{self.width}x{self.layers}, {self.batch}x{self.tokens}"


SIZES = {
    "small": HfSize(width=768, layers=12, batch=32, tokens=512, goals=(0.75, 0.72, 0.76)),
    "large": HfSize(
        width=2048,
        layers=16,
        batch=8,
        tokens=2048,
        goals=(0.91, 0.90, None),
        h200=(0.93, 0.92, None),
        packed=True,
        supplied_goal=0.94,
    ),
    "tiny": HfSize(width=64, layers=2, batch=2, tokens=32, vocabulary=256, packed=True),
}


@dataclass(frozen=True, slots=True)
class _Measured:
    """Seconds of a step, of its part on the host, and of the first step, which compiles; peak bytes."""

    step: float
    host: float
    first: float
    peak: int


def bench_hf(
    device: torch.device,
    log: Callable[[str], None],
    sizes: Sequence[str] | None = None,
    modes: Sequence[str] | None = None,
) -> Measurements:
    """Measure the sizes (of SIZES) in the modes (of MODES) on a device; by default those for this device.

    Raises ValueError if transformers is missing, or for an unknown name.
    """
    _check("--sizes", sizes, tuple(SIZES))
    _check("--modes", modes, MODES)
    rates = copy_bandwidth(device), product_rate(device)
    on_gpu = device.type == "cuda"
    results: list[Result] = []
    for size in [SIZES[name] for name in sizes or (("small", "large") if on_gpu else ("tiny",))]:
        for mode in modes or (MODES if on_gpu else MODES[:2]):
            results += _compared(size, mode, device, log)
    return measured("hf", device, tuple(results), rates)


def _check(option: str, names: Sequence[str] | None, known: tuple[str, ...]) -> None:
    for name in names or ():
        if name not in known:
            raise ValueError(
                f"{option}: must be one of {', '.join(known)}, got {name}. Pass one or more of these."
            )


def _compared(size: HfSize, mode: str, device: torch.device, log: Callable[[str], None]) -> list[Result]:
    """BF16 and nvfp4 of one model in one mode."""
    goals = size.h200 if size.h200 is not None and probe(device).name == "NVIDIA H200" else size.goals
    name, goal = f"{size.name} {mode}", goals[MODES.index(mode)]

    def measure(recipe: str | Recipe, what: str) -> _Measured:
        found = _measure(size, mode, recipe, device)
        log(
            f"{name} {what}: first step {found.first:.1f} s, then {found.step * 1e3:.1f} ms, "
            f"peak {found.peak / 2**30:.2f} GiB"
        )
        return found

    base, ours = measure("bf16", "bf16"), measure("nvfp4", "nvfp4")
    results = _speeds(name, base, ours, goal, None if mode == "eager" else _COMPILATION)
    if mode == "eager":
        supplied = measure(with_delayed_amax(get_recipe("nvfp4")), SUPPLIED)
        results.append(_step_of(f"{name} {SUPPLIED}", base, supplied, size.supplied_goal))
    if size.packed and mode == "compile":
        packed = measure(replace(get_recipe("nvfp4"), saved_inputs="packed"), "nvfp4, packed inputs")
        if packed.peak:
            results.append(
                Result(
                    name=f"{name} nvfp4, packed inputs, peak memory",
                    seconds=packed.step,
                    value=base.peak / packed.peak,
                    unit="times less",
                    goal=_PACKED_MEMORY,
                )
            )
    return results


def _speeds(
    name: str, base: _Measured, ours: _Measured, goal: float | None, first: float | None
) -> list[Result]:
    """Results of BF16's step, nvfp4's, and nvfp4's first. goal, first: goals of the latter two."""
    return [
        _step_of(f"{name} bf16", base, base, None),
        _step_of(f"{name} nvfp4", base, ours, goal),
        Result(
            name=f"{name} nvfp4, first step",
            seconds=ours.first,
            value=base.first / ours.first,
            unit=_UNIT,
            goal=first,
        ),
    ]


def _step_of(name: str, base: _Measured, own: _Measured, goal: float | None) -> Result:
    """The result of a step: its time, and its speed relative to BF16."""
    return Result(
        name=name,
        seconds=own.step,
        host_seconds=own.host,
        value=base.step / own.step,
        unit=_UNIT,
        goal=goal,
    )


def _measure(size: HfSize, mode: str, recipe: str | Recipe, device: torch.device) -> _Measured:
    release_memory(device)
    step = _training_step(size, mode, recipe, device)
    start = time.perf_counter()
    step()
    _wait(device)
    first = time.perf_counter() - start
    for _ in range(3):
        step()
    _wait(device)
    steps, hosts = [], []
    for _ in range(_STEPS):
        start = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - start)
        _wait(device)
        steps.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    torch.compiler.reset()
    return _Measured(statistics.median(steps), statistics.median(hosts), first, peak)


def _training_step(
    size: HfSize, mode: str, recipe: str | Recipe, device: torch.device
) -> Callable[[], Tensor]:
    """One optimizer step of a user's loop, which returns the loss."""
    model = _llama(size, device)
    if recipe != "bf16":
        convert(model, recipe)
    call: Any = model
    if mode != "eager":
        torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
        call = torch.compile(model, mode=None if mode == "compile" else mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, size.vocabulary, (size.batch, size.tokens), device=device, dtype=torch.int64)
    steps = iter(range(1 << 30))

    def step() -> Tensor:
        if recipe != "bf16":
            set_step(model, next(steps))
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device.type, torch.bfloat16):
            loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def _llama(size: HfSize, device: torch.device) -> nn.Module:
    transformers = load_transformers("bench hf")
    config = transformers.LlamaConfig(
        hidden_size=size.width,
        intermediate_size=size.width * 8 // 3 // 64 * 64,
        num_hidden_layers=size.layers,
        num_attention_heads=max(1, size.width // 64),
        vocab_size=size.vocabulary,
        max_position_embeddings=max(2048, size.tokens),
    )
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.LlamaForCausalLM(config).train()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
