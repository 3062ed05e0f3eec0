"""The learning rate as a pure function of the step: warmup, stable, decay (WSD, arXiv:2404.06395)."""

from fourbits.train.config import OptimConfig


def learning_rate(step: int, num_steps: int, config: OptimConfig) -> float:
    """Learning rate of one step. step: 0 for the first.

    Linear from lr/W to lr over the first W = round(warmup_share * num_steps) steps, then constant, then
    linear over the last round(decay_share * num_steps) steps; the very last step runs at final_lr_factor *
    lr.
    """
    warmup = round(config.warmup_share * num_steps)
    decay = min(round(config.decay_share * num_steps), num_steps - warmup)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    into_decay = step - (num_steps - decay) + 1
    if into_decay <= 0:
        return config.lr
    final = config.final_lr_factor
    return config.lr * (final + (1 - final) * (1 - into_decay / decay))
