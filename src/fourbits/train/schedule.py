"""The learning rate as a pure function of the step: warmup, stable, decay (WSD, arXiv:2404.06395)."""

import math

from fourbits.train.config import OptimConfig


def learning_rate(step: int, num_steps: int, config: OptimConfig) -> float:
    """Learning rate of one step. step: 0 for the first.

    Linear from lr/W to lr over the first W warmup steps, then constant, then a decay, linear or half a period
    of a cosine, over the last round(decay_share * num_steps) steps; the very last step runs at
    final_lr_factor * lr.
    """
    warmup, decay = warmup_steps(num_steps, config), decay_steps(num_steps, config)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    into_decay = step - (num_steps - decay) + 1
    if into_decay <= 0:
        return config.lr
    final = config.final_lr_factor
    left = 1 - into_decay / decay
    if config.decay == "cosine":
        left = (1 + math.cos(math.pi * into_decay / decay)) / 2
    return config.lr * (final + (1 - final) * left)


def warmup_steps(num_steps: int, config: OptimConfig) -> int:
    """Steps of warmup in a run of num_steps steps."""
    if config.warmup_steps is not None:
        return min(config.warmup_steps, num_steps)
    return round(config.warmup_share * num_steps)


def decay_steps(num_steps: int, config: OptimConfig) -> int:
    """Steps of decay in a run of num_steps steps."""
    return min(round(config.decay_share * num_steps), num_steps - warmup_steps(num_steps, config))


def describe_schedule(num_steps: int, config: OptimConfig) -> str:
    """The schedule in one line."""
    warmup, decay = warmup_steps(num_steps, config), decay_steps(num_steps, config)
    return (
        f"warmup to step {warmup}, lr {config.lr:g} to step {num_steps - decay}, "
        f"{config.decay} decay to {config.final_lr_factor * config.lr:g} at step {num_steps}"
        if decay
        else f"warmup to step {warmup}, lr {config.lr:g} to step {num_steps}, no decay"
    )
