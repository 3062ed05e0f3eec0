"""Small models of ours and of transformers, with weights that affect every output."""

from typing import Any

import torch
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fourbits.model.config import RopeScaling
from fourbits.model.lm import LanguageModel
from model.shapes import small_config

#: the defaults of fields that a Transformer does not use
NO_MAMBA: dict[str, Any] = {
    "mamba_num_heads": 0,
    "mamba_head_dim": 64,
    "state_size": 128,
    "num_groups": 8,
    "chunk_size": 128,
}
OURS: dict[str, dict[str, Any]] = {
    "hybrid": {"pattern": "M-*-M-"},
    "llama": {"pattern": "TT", "activation": "swiglu", "rope_theta": 5e4, **NO_MAMBA},
    "relu2 transformer": {"pattern": "TT", "activation": "relu2", "rope_theta": 1e4, **NO_MAMBA},
    "llama 3.1": {
        "pattern": "TT",
        "activation": "swiglu",
        "rope_theta": 1e4,
        **NO_MAMBA,
        "rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_seq_len=32),
    },
    "stretched llama": {
        "pattern": "TT",
        "activation": "swiglu",
        "rope_theta": 1e4,
        **NO_MAMBA,
        "rope_scaling": RopeScaling(kind="linear", factor=4.0),
    },
    "mistral": {
        "pattern": "TT",
        "activation": "swiglu",
        "rope_theta": 1e4,
        **NO_MAMBA,
        "sliding_window": 5,
    },
    "wide llama": {
        "pattern": "TT",
        "activation": "swiglu",
        "rope_theta": 1e4,
        **NO_MAMBA,
        "num_heads": 5,
        "num_kv_heads": 1,  # 5 does not divide 48
    },
    "qwen3": {"pattern": "TT", "activation": "swiglu", "rope_theta": 1e6, "qk_norm": True, **NO_MAMBA},
}
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MAMBA: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 8,
}
NAMES = list(OURS)
#: transformers' settings of the models above; of the others, only the class
THEIRS: dict[str, dict[str, Any]] = {
    "llama 3.1": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "stretched llama": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "mistral": {"sliding_window": 5},
    "wide llama": {"sliding_window": None, "num_attention_heads": 5, "num_key_value_heads": 1},
}
CLASSES: dict[str, Any] = {
    "hybrid": (NemotronHConfig, NemotronHForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "relu2 transformer": (ArceeConfig, ArceeForCausalLM),
    "llama 3.1": (LlamaConfig, LlamaForCausalLM),
    "stretched llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "wide llama": (MistralConfig, MistralForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@torch.no_grad()
def stir(model: torch.nn.Module) -> None:
    """Random gains, and time steps of 1e-6 to 0.1, of which transformers clamps those below 0.001.

    The first half of the heads has the small ones and A_log = D = 0, so that their effect is visible.
    """
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.normal_(mean=1, std=0.2)
        elif name.endswith("dt_bias"):
            small, large = parameter.chunk(2)
            small.uniform_(-13.8, -9.2)
            large.uniform_(-6.5, -2.3)
        elif name.endswith(("A_log", ".D")):
            parameter.normal_(std=0.5)
            parameter[: len(parameter) // 2] = 0
        elif parameter.dim() == 2:
            parameter.normal_(std=0.2)


def ours(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> LanguageModel:
    model = LanguageModel(small_config(**OURS[name], **changes), compute_dtype=dtype)
    stir(model)
    return model


def theirs(name: str, **changes: Any) -> Any:
    config, kind = CLASSES[name]
    layers: dict[str, Any] = MAMBA if name == "hybrid" else {"num_hidden_layers": 2}
    model = kind(config(**{**SIZES, **layers, **THEIRS.get(name, {}), **changes}))
    stir(model)
    return model.float().eval()


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(tokens) if isinstance(model, LanguageModel) else model(tokens, use_cache=False).logits
    return found.float()


def assert_same_logits(found: Any, wanted: Any, tokens: torch.Tensor) -> None:
    """In FP32, through a few blocks."""
    difference = (logits(found, tokens) - logits(wanted, tokens)).norm()
    assert difference <= 1e-5 * logits(wanted, tokens).norm()
