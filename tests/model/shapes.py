"""Small models for tests, by pattern."""

from typing import Any

import torch

from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel


def small_config(pattern: str = "M-*-", **changes) -> ModelConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "d_model": 48,
        "d_ffn": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "state_size": 16,
        "num_groups": 2,
        "chunk_size": 8,
    }
    return ModelConfig(pattern=pattern, **{**sizes, **changes})


def small_model(pattern: str = "M-*-", dtype=torch.float32, seed: int = 0, **changes) -> LanguageModel:
    return LanguageModel(small_config(pattern, **changes), compute_dtype=dtype, seed=seed)


def random_tokens(batch: int, length: int, vocab_size: int = 64) -> torch.Tensor:
    return torch.randint(vocab_size, (batch, length))
