"""Small models of ours and of transformers, with weights that affect every output."""

from typing import Any

import torch
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
)

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
    if name == "hybrid":
        model: Any = NemotronHForCausalLM(NemotronHConfig(**SIZES, **MAMBA, **changes))
    elif name == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, **changes))
    else:
        model = ArceeForCausalLM(ArceeConfig(**SIZES, num_hidden_layers=2, **changes))
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
