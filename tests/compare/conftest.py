"""A comparison that takes seconds: a small text, a minimal tokenizer, one attention and one FFN block."""

import random
from pathlib import Path

import pytest
import torch

from fourbits.data.config import DataConfig
from fourbits.model.config import ModelConfig
from fourbits.settings import dump_yaml, to_dict
from fourbits.train.config import OptimConfig, RunConfig, TrainConfig

TEXT = "the amax of a block over six is its scale and every code a step on that grid"


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """These models are too small for a second thread to help."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """8 steps of 2 x 32 tokens, validated every 2 steps and saved every 3."""
    text = tmp_path_factory.mktemp("text") / "letters.txt"
    rng = random.Random(0)
    text.write_text(" ".join(rng.choice(TEXT.split()) for _ in range(6000)), encoding="utf-8")
    return RunConfig(
        model=ModelConfig(
            vocab_size=384, d_model=32, pattern="*-", d_ffn=64, num_heads=2, num_kv_heads=1, head_dim=16
        ),
        data=DataConfig(paths=(str(text),), vocab_size=384),
        optim=OptimConfig(lr=1e-2),
        train=TrainConfig(
            steps=8,
            micro_batch_size=2,
            seq_len=32,
            validation_interval=2,
            validation_samples=2,
            checkpoint_interval=3,
            threads=1,
            device="cpu",
            compile="none",
        ),
    )


@pytest.fixture
def small_config(small_run: RunConfig, tmp_path: Path) -> Path:
    """The same as a YAML file."""
    path = tmp_path / "small.yaml"
    path.write_text(dump_yaml(to_dict(small_run)), encoding="utf-8")
    return path
