"""Configurations of the smallest models: one attention and one FFN block, or a Mamba-2 block before them."""

from typing import Any

from fourbits.model.config import ModelConfig


def attention_model(**changes: Any) -> ModelConfig:
    """Two blocks, 32 wide. changes: fields in place of the ones here."""
    fields: dict[str, Any] = {
        "vocab_size": 384,
        "d_model": 32,
        "pattern": "*-",
        "d_ffn": 64,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
    }
    return ModelConfig(**fields | changes)


def hybrid_model(**changes: Any) -> ModelConfig:
    """The same with a Mamba-2 block in front."""
    mamba = {"mamba_num_heads": 2, "mamba_head_dim": 16, "state_size": 16, "num_groups": 1}
    return attention_model(**{"pattern": "M*-"} | mamba | changes)
