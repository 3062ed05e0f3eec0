"""The settings that may change when a run continues in its folder, and the effect of a changed length.

A run may become longer or shorter if the new schedule gives the finished steps the same learning rates and
samples of the same phases. Its warmup keeps its number of steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fourbits.train.config import RunConfig, differences
from fourbits.train.precision import same_until
from fourbits.train.schedule import describe_schedule, learning_rate, warmup_steps

# Settings that affect where and how a run executes and what it saves, not the training itself. Only the first
# nine can change results bitwise.
FREE_SETTINGS = (
    "train.device",
    "train.backend",
    "train.threads",
    "train.compile",
    "train.deterministic",
    "parallel.replicate",
    "parallel.shard",
    "parallel.tensor",
    "parallel.accumulate",
    "train.log_interval",
    "train.health_interval",
    "train.recompute_check_interval",
    "train.recompute_mismatch",
    "train.checkpoint_interval",
    "train.keep_checkpoints",
    "train.save_every_minutes",
    "train.keep_every",
    "train.evaluate",
    "train.evaluate_every",
    "train.evaluate_datasets",
    "train.background_saves",
    "train.time_limit",
    "train.non_finite",
    "train.spike",
    "train.rollback_steps",
    "train.max_rollbacks",
    "train.sinks",
    "train.cuda_graph",
    "train.activation_checkpointing",
    "parallel.gather",
    "parallel.gather_weights",
    "parallel.reshard",
    "parallel.timeout",
    "recipe.saved_inputs",
)
# Where the text is; its content is checked by hash.
LOCATIONS = ("data.paths", "data.tokenizer")
LENGTH = ("train.steps", "train.tokens")


def changed_settings(stored: RunConfig, config: RunConfig) -> list[str]:
    """Settings that make `config` a different run from `stored`, whatever its length."""
    free = [*FREE_SETTINGS, *LOCATIONS, *LENGTH]
    config = with_stored_warmup(stored, config)
    if config.optim.warmup_steps == warmup_steps(stored.train.num_steps, stored.optim):
        free.append("optim.warmup_steps")
    return [name for name in differences(stored, config) if name not in free]


def with_stored_warmup(stored: RunConfig, config: RunConfig) -> RunConfig:
    """`config` with as many warmup steps as `stored`, if their lengths differ or that of `stored` changed."""
    other_length = stored.train.num_steps != config.train.num_steps
    if config.optim.warmup_steps is not None or not (other_length or stored.optim.warmup_steps is not None):
        return config
    steps = warmup_steps(stored.train.num_steps, stored.optim)
    return replace(config, optim=replace(config.optim, warmup_steps=steps))


def extended(
    stored: RunConfig, config: RunConfig, saved: Sequence[int], where: str
) -> tuple[RunConfig, str | None]:
    """`config` for a run that began as `stored`, and a message if its length changes.

    saved: the steps of its checkpoints, ascending; where: the run folder. Raises ValueError if the learning
    rate or the precision of a step that is done would differ.
    """
    done = saved[-1] if saved else 0
    old, new = stored.train.num_steps, config.train.num_steps
    config = with_stored_warmup(stored, config)
    if old == new:
        return config, None
    same = 0
    while same < min(done, new) and _rate(stored, same) == _rate(config, same):
        same += 1
    rates, same = same, min(same, same_until(stored, config, min(done, new)))
    if same < done:
        differs = "the learning rate" if same == rates else "the precision by recipe.schedule"
        earlier = [step for step in saved if step <= same]
        raise ValueError(
            f"{where}: train.steps cannot change from {old} to {new} at step {done}: {differs} "
            f"differs from step {same + 1} on. Continue in a new folder: fourbits train --from {where} "
            f"--out NEW --train.steps {max(new, done + 1)}"
            + (f", or --from {where}/checkpoints/step_{earlier[-1]}, before that." if earlier else ".")
        )
    return config, f"{old} steps become {new}: {describe_schedule(new, config.optim)}"


def check_phases(old: Mapping[str, Any], new: Mapping[str, Any], samples: int, where: str) -> None:
    """Raises ValueError if one of the first `samples` samples would come from another phase.

    old, new: sample streams, as under data.plan in manifest.json.
    """
    before, after = ([p for p in stream["phases"] if p["first_sample"] < samples] for stream in (old, new))
    for one, other in zip(before, after, strict=False):
        same = all(one[key] == other[key] for key in ("first_sample", "slots"))
        ends = (_end_in(stream, phase, samples) for stream, phase in ((old, one), (new, other)))
        if not same or len(set(ends)) > 1:
            raise ValueError(
                f"{where}: the length cannot change: data.phases are parts of the whole run, and samples "
                "that were read belong to another phase of the new one. Continue in a new folder: "
                f"fourbits train --from {where} --out NEW."
            )


def _end_in(stream: Mapping[str, Any], phase: Mapping[str, Any], samples: int) -> int:
    """Where a phase ends among the first `samples` samples. After a rollback the last one has no end."""
    return samples if phase == stream["phases"][-1] else min(phase["end_sample"], samples)


def _rate(config: RunConfig, step: int) -> float:
    return learning_rate(step, config.train.num_steps, config.optim)
