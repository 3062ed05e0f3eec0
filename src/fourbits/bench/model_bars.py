"""What a recipe's steps of a model gave, and the bars that compare it with BF16, the peak and peers."""

from dataclasses import dataclass, field

from fourbits.bench.layer_times import LayerTimes
from fourbits.bench.model_peers import PeerRun
from fourbits.bench.saved_bytes import MemoryBreakdown, SavedBytes
from fourbits.bench.timing import Bar

BASE = "bf16"
#: what `--recipes` may say behind a recipe's name: inputs are saved in codes and scales
PACKED = ":packed"
#: at the sizes that the goals are for: of BF16's tokens/s, and bytes of saved inputs over BF16's
_GOAL_PRESETS, _GOAL, _GOAL_MFU = ("transformer-1.2b", "hybrid-1.2b"), 0.90, (0.50, 0.45)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRun:
    """One recipe's steps. flops: of a token, by kind; mfu: all of them as a share of the card's peak.

    seconds: of a step from CUDA graphs, eager_seconds: kernel by kernel, which both are if eager_because says
    why. layers, layer_mfu: kernel time by type of layer, and utilization while it runs; on a card only.
    """

    recipe: str
    seconds: float
    eager_seconds: float
    tokens_per_second: float
    flops: dict[str, float]
    mfu: float | None
    memory: MemoryBreakdown
    saved: SavedBytes
    quantized: tuple[str, ...]
    product_rate: float
    eager_because: str | None
    #: then nothing is known of the card's allocator, and nothing more is measured
    capture_failed: bool = False
    layers: LayerTimes | None = None
    layer_mfu: dict[str, float] = field(default_factory=dict)


def model_bars(preset: str, runs: list[ModelRun], peers: list[PeerRun]) -> tuple[Bar, ...]:
    """Tokens/s and utilization, memory, and tokens/s against peers; what there is no base for is left out."""
    return (*_rates(preset, runs), *_memory(runs), *_against_peers(runs, peers))


def _base(runs: list[ModelRun]) -> ModelRun | None:
    return next((run for run in runs if run.recipe == BASE), None)


def _rates(preset: str, runs: list[ModelRun]) -> list[Bar]:
    base, bars = _base(runs), []
    for run in runs:
        goal = _GOAL if preset in _GOAL_PRESETS and run.recipe == "nvfp4" else None
        if base is not None:
            value = base.seconds / run.seconds
            bars.append(Bar(name=run.recipe, seconds=run.seconds, value=value, unit="of BF16", goal=goal))
        if run.mfu is not None:
            at_size = preset in _GOAL_PRESETS and run.recipe == BASE
            goal = _GOAL_MFU[_GOAL_PRESETS.index(preset)] if at_size else None
            name = f"{run.recipe}, MFU"
            bars.append(Bar(name=name, seconds=run.seconds, value=run.mfu, unit="of peak", goal=goal))
    return bars


def _memory(runs: list[ModelRun]) -> list[Bar]:
    """How many times less memory: BF16's bytes over the recipe's, of saved inputs and at the peak."""
    base, bars = _base(runs), []
    for run in runs:
        packed = run.recipe.endswith(PACKED)
        if base is None or not run.quantized:
            continue
        theirs = sum(base.saved.inputs.get(name, 0) for name in run.quantized)
        ours = sum(run.saved.inputs.get(name, 0) for name in run.quantized)
        shares = {"saved inputs of quantized linears": (theirs / ours, 1 / 0.29)}
        if base.memory.peak and run.memory.peak:
            shares["peak memory"] = (base.memory.peak / run.memory.peak, 1 / 0.87)
        bars += [
            Bar(
                name=f"{run.recipe}, {what}",
                seconds=run.seconds,
                value=value,
                unit="times less",
                goal=goal if packed else None,
            )
            for what, (value, goal) in shares.items()
        ]
    return bars


def _against_peers(runs: list[ModelRun], peers: list[PeerRun]) -> list[Bar]:
    base = _base(runs)
    if base is None:
        return []
    return [
        Bar(
            name=f"bf16 against {peer.name}",
            seconds=peer.seconds,
            value=base.tokens_per_second / peer.tokens_per_second,
            unit="times its tokens/s",
            goal=peer.goal,
        )
        for peer in peers
        if peer.seconds is not None and peer.tokens_per_second is not None
    ]
