"""Run presets, as data: their names work wherever a configuration does."""

from fourbits.data.config import DataConfig
from fourbits.model.presets import MODEL_PRESETS
from fourbits.train.config import OptimConfig, RunConfig, TrainConfig

RUN_PRESETS: dict[str, RunConfig] = {
    # The demo: 245 steps, half a million tokens of the standard library, about a minute on two CPU cores. Of
    # 2e-3, 4e-3, 8e-3 and 1.6e-2 this rate gave the lowest BF16 loss (6e-3 equals it).
    "tiny": RunConfig(
        model=MODEL_PRESETS["tiny"],
        optim=OptimConfig(lr=4e-3),
        train=TrainConfig(
            tokens=500_000,
            micro_batch_size=8,
            seq_len=256,
            validation_interval=35,
            validation_samples=16,
            checkpoint_interval=70,
        ),
    ),
    # A first run on a GPU. The text that comes with Python is read many times over: name your own.
    "30m": RunConfig(
        model=MODEL_PRESETS["30m"],
        data=DataConfig(vocab_size=8192),
        optim=OptimConfig(lr=1.2e-3),
        train=TrainConfig(
            tokens=100_000_000,
            micro_batch_size=64,
            gradient_accumulation=2,
            seq_len=512,
            validation_interval=100,
            validation_samples=64,
            checkpoint_interval=500,
        ),
    ),
}
