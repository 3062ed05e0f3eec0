"""Run presets, as data. Their names can be used wherever a configuration file can.

Learning rates and schedules follow arXiv:2509.25149 (warmup, constant, decay to a hundredth). The Llamas have
the learning rates of the comparison they come from, with this schedule in place of its cosine. The paper does
not state its warmup; here it is a thousandth of the run, which is hundreds of steps.
"""

from fourbits.data.config import DataConfig
from fourbits.model.presets import COMPARED_VOCABULARY, MODEL_PRESETS, PAPER_VOCABULARY
from fourbits.train.config import OptimConfig, RunConfig, TrainConfig

TRILLION = 10**12


def _compared(model: str, lr: float, micro_batch: int, tokens: int, warmup: float = 0.1) -> RunConfig:
    """A run of the small comparisons: 512 sequences of 512 tokens per step."""
    return RunConfig(
        model=MODEL_PRESETS[model],
        data=DataConfig(vocab_size=COMPARED_VOCABULARY),
        optim=OptimConfig(lr=lr, warmup_share=warmup),
        train=TrainConfig(
            tokens=tokens,
            micro_batch_size=micro_batch,
            gradient_accumulation=512 // micro_batch,
            seq_len=512,
            validation_interval=500,
            validation_samples=64,
            checkpoint_interval=1000,
        ),
    )


def _published(
    model: str,
    lr: float,
    decay_share: float,
    trillions: int,
    micro_batch: int,
    accumulation: int,
    recompute: bool = False,
) -> RunConfig:
    """A run at the paper's size. The standard library fills half of its vocabulary: use your own data."""
    return RunConfig(
        model=MODEL_PRESETS[model],
        data=DataConfig(vocab_size=PAPER_VOCABULARY // 2, model_vocab_size=PAPER_VOCABULARY),
        optim=OptimConfig(lr=lr, warmup_share=0.001, decay_share=decay_share),
        train=TrainConfig(
            tokens=trillions * TRILLION,
            micro_batch_size=micro_batch,
            gradient_accumulation=accumulation,
            seq_len=8192,
            validation_interval=1000,
            validation_samples=32,
            checkpoint_interval=1000,
            activation_checkpointing="full" if recompute else "none",
        ),
    )


RUN_PRESETS: dict[str, RunConfig] = {
    # The demo: 245 steps, half a million tokens of the standard library, about a minute on two CPU cores.
    # Among 2e-3, 4e-3, 8e-3 and 1.6e-2 this learning rate gave the lowest BF16 loss (6e-3 gave the same).
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
    # A first run on a GPU. It reads the standard library many times over: use your own data for more.
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
    # The comparison's runs with 25 tokens per parameter, extended: rates fall with 1 / width from 768 on.
    "50m": _compared("50m", lr=1.2e-3, micro_batch=64, tokens=1_250_000_000),
    "100m": _compared("100m", lr=9e-4, micro_batch=64, tokens=2_500_000_000),
    "200m": _compared("200m", lr=7.2e-4, micro_batch=64, tokens=5_000_000_000),
    "400m": _compared("400m", lr=5.5e-4, micro_batch=32, tokens=10_000_000_000),
    "1b": _compared("1b", lr=4.5e-4, micro_batch=16, tokens=25_000_000_000),
    # Not tuned: the learning rate of the paper's smallest model, with the batch and length of the Llamas
    # above.
    "hybrid-30m": _compared("hybrid-30m", lr=1.2e-3, micro_batch=64, tokens=750_000_000),
    "hybrid-50m": _compared("hybrid-50m", lr=1.2e-3, micro_batch=64, tokens=1_250_000_000),
    "hybrid-100m": _compared("hybrid-100m", lr=1.2e-3, micro_batch=64, tokens=2_500_000_000),
    "hybrid-200m": _compared("hybrid-200m", lr=1.2e-3, micro_batch=32, tokens=5_000_000_000),
    "hybrid-400m": _compared("hybrid-400m", lr=1.2e-3, micro_batch=16, tokens=10_000_000_000),
    "hybrid-1b": _compared("hybrid-1b", lr=1.2e-3, micro_batch=8, tokens=25_000_000_000),
    # For one GPU: steps of 32 sequences; the paper's have 768. Accumulate 24 times as many to match it.
    "transformer-1.2b": _published(
        "transformer-1.2b", lr=1.2e-3, decay_share=0.15, trillions=1, micro_batch=4, accumulation=8
    ),
    "hybrid-1.2b": _published(
        "hybrid-1.2b", lr=1.2e-3, decay_share=0.15, trillions=1, micro_batch=2, accumulation=16
    ),
    # For many GPUs: the published steps of 768 and 736 sequences.
    "hybrid-8b": _published(
        "hybrid-8b", lr=8e-4, decay_share=0.15, trillions=1, micro_batch=1, accumulation=768, recompute=True
    ),
    "hybrid-12b": _published(
        "hybrid-12b",
        lr=4.5e-4,
        decay_share=0.2,
        trillions=10,
        micro_batch=1,
        accumulation=736,
        recompute=True,
    ),
    # arXiv:2508.14444: 20T tokens, of which the last 3.6T decay.
    "nemotron-nano-12b-v2": _published(
        "nemotron-nano-12b-v2",
        lr=4.5e-4,
        decay_share=0.18,
        trillions=20,
        micro_batch=1,
        accumulation=768,
        recompute=True,
    ),
}
