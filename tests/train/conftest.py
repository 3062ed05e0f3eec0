"""A run that takes seconds: a corpus of two sources, the smallest tokenizer, a hybrid of three blocks."""

import random
from pathlib import Path

import pytest
import torch

from fourbits.data.config import DataConfig, open_data
from fourbits.data.stream.dataset import PreparedData
from fourbits.model.config import ModelConfig
from fourbits.train.config import OptimConfig, RunConfig, TrainConfig
from fourbits.train.parallel import ParallelConfig

TEXT = "the block scale of a tensor is its amax over six and every code is a step on that grid"


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """These models are so small that a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """Two folders of text, 20 documents each."""
    root = tmp_path_factory.mktemp("texts")
    rng = random.Random(0)
    for source in ("notes", "letters"):
        (root / source).mkdir()
        for number in range(20):
            words = " ".join(rng.choice(TEXT.split()) for _ in range(400))
            (root / source / f"{number}.txt").write_text(words, encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def data_cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def config(texts) -> RunConfig:
    """12 steps of 2 micro-batches of 2 x 32 tokens, in nvfp4."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=384,
            d_model=32,
            pattern="M-*",
            d_ffn=64,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            mamba_num_heads=4,
            mamba_head_dim=16,
            state_size=16,
            num_groups=1,
            chunk_size=16,
        ),
        data=DataConfig(paths=(str(texts / "notes"), str(texts / "letters")), vocab_size=384),
        optim=OptimConfig(lr=1e-2),
        train=TrainConfig(
            steps=12,
            micro_batch_size=2,
            gradient_accumulation=2,
            seq_len=32,
            validation_interval=4,
            validation_samples=3,
            checkpoint_interval=5,
            threads=1,
            device="cpu",
            compile="none",
        ),
        parallel=ParallelConfig(gather_weights=8000),  # of three blocks, the first two share a gather
    )


@pytest.fixture(scope="session")
def data(config, data_cache) -> PreparedData:
    return open_data(config.data, data_cache)
