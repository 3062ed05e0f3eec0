"""The cost of the presets, as far as it is known: counts, measured speeds and peaks, and bounds for the rest.

Speeds are those of the nvfp4 recipe, emulated; docs/benchmarks.md has commits and commands.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fourbits.data.stream.dataset import PreparedData
from fourbits.data.stream.manifest import is_prepared
from fourbits.device import Device, peak_flops
from fourbits.model.counts import count_parameters, training_flops
from fourbits.train.config import RunConfig
from fourbits.train.presets import RUN_PRESETS

# FP32 master weights, FP32 gradients, and the optimizer's two FP32 moments.
STATE_BYTES = 16
#: the GPU whose datasheet rate bounds the time of presets that were not measured; an H200 has the same
ESTIMATED_ON = "NVIDIA H100 80GB HBM3"
ESTIMATED_MEMORY = 80 * 10**9
#: lowest and highest utilization among the measured presets on GPUs (30m; transformer-1.2b), of BF16's peak
UTILIZATION = (0.21, 0.51)


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured run of nvfp4. peak_bytes: of the GPU, or of the process on a CPU."""

    device: str
    tokens_per_second: float
    peak_bytes: int


def _gib(value: float) -> int:
    return round(value * 2**30)


MEASURED = {
    "tiny": Measured("2 CPU cores", 7_634, 749 * 2**20),
    "30m": Measured("H100", 947_502, _gib(5.24)),
    "transformer-1.2b": Measured("H200", 61_108, _gib(60.0)),
    "hybrid-1.2b": Measured("H200", 70_959, _gib(43.7)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetFigures:
    """One preset. seconds: (fewest, most), equal where measured; None where the states alone need more memory
    than the GPU has. state_bytes: of weights, gradients and moments, a lower bound of the memory.
    """

    name: str
    pattern: str
    parameters: int
    tokens: int
    tokens_per_step: int
    state_bytes: int
    measured: Measured | None
    seconds: tuple[float, float] | None


def preset_figures() -> list[PresetFigures]:
    """Every run preset, in the order of their definition."""
    return [figures_of(name, config) for name, config in RUN_PRESETS.items()]


def with_expected_vocabulary(config: RunConfig) -> RunConfig:
    """The run with the vocabulary its model will have: a prepared folder's, else the largest possible."""
    paths = config.data.paths
    prepared = len(paths) == 1 and is_prepared(Path(paths[0]))
    own = PreparedData.open(paths[0]).tokenizer.vocab_size if prepared else config.data.vocab_size
    vocabulary = max(own, config.data.model_vocab_size)
    return replace(config, model=replace(config.model, vocab_size=vocabulary))


def figures_of(name: str, config: RunConfig) -> PresetFigures:
    """The figures of one preset."""
    config = with_expected_vocabulary(config)
    parameters = sum(count_parameters(config.model).values())
    measured = MEASURED.get(name)
    tokens = config.train.num_steps * config.train.tokens_per_step
    states = STATE_BYTES * parameters
    seconds = None
    if measured:
        seconds = (tokens / measured.tokens_per_second, tokens / measured.tokens_per_second)
    elif states < ESTIMATED_MEMORY:
        slow, fast = _estimated_speeds(config)
        seconds = (tokens / fast, tokens / slow)
    return PresetFigures(
        name=name,
        pattern=config.model.pattern,
        parameters=parameters,
        tokens=tokens,
        tokens_per_step=config.train.tokens_per_step,
        state_bytes=states,
        measured=measured,
        seconds=seconds,
    )


def estimated_seconds(config: RunConfig) -> float:
    """The time of a run on one GPU, at the mean of the utilizations that were measured on an H100."""
    slow, fast = _estimated_speeds(config)
    return config.train.num_steps * config.train.tokens_per_step * 2 / (slow + fast)


def _estimated_speeds(config: RunConfig) -> tuple[float, float]:
    """Tokens/s at the lowest and the highest utilization that was measured."""
    gpu = Device(
        kind="cuda",
        name=ESTIMATED_ON,
        capability=(9, 0),
        memory_bytes=None,
        torch_version="",
        triton_version=None,
        cpp_compiler=None,
    )
    peak = peak_flops(gpu, torch.bfloat16)
    assert peak is not None, "the GPU is in the table of peaks"
    flops = sum(training_flops(config.model, config.train.seq_len).values())
    slow, fast = (share * peak / flops for share in UTILIZATION)
    return slow, fast
