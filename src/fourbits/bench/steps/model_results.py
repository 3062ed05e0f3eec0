"""A recipe's measured steps, and the results that compare it with BF16, the peak and peers."""

from dataclasses import dataclass, field

from fourbits.bench.peers.model import PeerRun
from fourbits.bench.steps.layer_times import LayerTimes
from fourbits.bench.steps.saved_bytes import MemoryBreakdown, SavedBytes
from fourbits.bench.timing import Result

BASE = "bf16"
#: suffix of a recipe's name in `--recipes`: inputs are saved as codes and scales
PACKED = ":packed"
#: presets with targets; nvfp4's target as a share of BF16's tokens/s; targets of BF16's MFU
_GOAL_PRESETS, _GOAL, _GOAL_MFU = ("transformer-1.2b", "hybrid-1.2b"), 0.90, (0.50, 0.45)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRun:
    """One recipe's steps. flops: per token, by kind; mfu: their sum as a share of the GPU's peak.

    seconds: of a step from CUDA graphs; eager_seconds: of a step kernel by kernel. Both are the latter if
    eager_because gives a reason. layers, layer_mfu: kernel time by type of layer, and utilization while it
    runs; on a GPU only.
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
    #: if true, the state of the GPU's allocator is unknown and the benchmark stops
    capture_failed: bool = False
    layers: LayerTimes | None = None
    layer_mfu: dict[str, float] = field(default_factory=dict)


def model_results(preset: str, runs: list[ModelRun], peers: list[PeerRun]) -> tuple[Result, ...]:
    """Tokens/s and MFU, memory, and tokens/s relative to peers; results without a base are skipped."""
    return (*_rates(preset, runs), *_memory(runs), *_against_peers(runs, peers))


def _base(runs: list[ModelRun]) -> ModelRun | None:
    return next((run for run in runs if run.recipe == BASE), None)


def _rates(preset: str, runs: list[ModelRun]) -> list[Result]:
    base, results = _base(runs), []
    for run in runs:
        goal = _GOAL if preset in _GOAL_PRESETS and run.recipe == "nvfp4" else None
        if base is not None:
            value = base.seconds / run.seconds
            results.append(
                Result(name=run.recipe, seconds=run.seconds, value=value, unit="of BF16", goal=goal)
            )
        if run.mfu is not None:
            at_size = preset in _GOAL_PRESETS and run.recipe == BASE
            goal = _GOAL_MFU[_GOAL_PRESETS.index(preset)] if at_size else None
            name = f"{run.recipe}, MFU"
            results.append(Result(name=name, seconds=run.seconds, value=run.mfu, unit="of peak", goal=goal))
    return results


def _memory(runs: list[ModelRun]) -> list[Result]:
    """BF16's memory relative to the recipe's: saved inputs, and the peak."""
    base, results = _base(runs), []
    for run in runs:
        packed = run.recipe.endswith(PACKED)
        if base is None or not run.quantized:
            continue
        theirs = sum(base.saved.inputs.get(name, 0) for name in run.quantized)
        ours = sum(run.saved.inputs.get(name, 0) for name in run.quantized)
        shares = {"saved inputs of quantized linear layers": (theirs / ours, 1 / 0.29)}
        if base.memory.peak and run.memory.peak:
            shares["peak memory"] = (base.memory.peak / run.memory.peak, 1 / 0.87)
        results += [
            Result(
                name=f"{run.recipe}, {what}",
                seconds=run.seconds,
                value=value,
                unit="times less",
                goal=goal if packed else None,
            )
            for what, (value, goal) in shares.items()
        ]
    return results


def _against_peers(runs: list[ModelRun], peers: list[PeerRun]) -> list[Result]:
    base = _base(runs)
    if base is None:
        return []
    return [
        Result(
            name=f"bf16 against {peer.name}",
            seconds=peer.seconds,
            value=base.tokens_per_second / peer.tokens_per_second,
            unit="times its tokens/s",
            goal=peer.goal,
        )
        for peer in peers
        if peer.seconds is not None and peer.tokens_per_second is not None
    ]
