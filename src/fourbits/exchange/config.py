"""Import and export of transformers configurations. Settings that this model does not support are refused.

One difference needs care. transformers' NemotronH clamps every time step dt to at least `time_step_min`
(0.001 by default) in training and prefill, but not in single-token decoding. Megatron-LM, which trained the
published models, never clamps. So an export writes a `time_step_min` too small to have an effect, and an
import either follows transformers or does not clamp.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fourbits.exchange.families import NEMOTRON_H, Family, family_named, family_of
from fourbits.model.config import ModelConfig

# transformers takes the logarithm of time_step_min, so it cannot be 0. A step of 1e-30 adds nothing in FP32.
NO_TIME_STEP_MIN = 1e-30

LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
}
LAYER_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}

# Settings without a counterpart here, and the values that are accepted. An absent key counts as accepted.
ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    "nemotron_h": {
        "use_bias": (False,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "mamba_proj_bias": (False,),
        "use_conv_bias": (True,),
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
        "sliding_window": (None,),
        "num_nextn_predict_layers": (0,),
        "attention_dropout": (0,),
        "hidden_dropout": (0,),
    },
    "llama": {
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "hidden_act": ("silu",),
        "attention_dropout": (0, None),
        "pretraining_tp": (1, None),
    },
    "arcee": {
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "hidden_act": ("relu2",),
        "attention_dropout": (0,),
    },
}

# transformers' defaults for absent keys: the longest sequence, the norm's epsilon.
ABSENT = {"nemotron_h": (4096, 1e-5), "llama": (2048, 1e-6), "arcee": (4096, 1e-5)}


def to_hf_config(
    config: ModelConfig, dtype: torch.dtype = torch.bfloat16, end_token: int | None = None
) -> dict[str, Any]:
    """The content of config.json. dtype: of the weights; end_token: the token that ends a text.

    A hybrid with tied embeddings is exported with two equal tables, because NemotronH does not tie them.
    Document masking (`document_end`) has no counterpart in transformers: a sequence is one context. Raises
    ValueError for a model that no transformers class computes, and for an end_token outside the vocabulary.
    """
    family = family_of(config)
    if end_token is not None and end_token not in range(config.vocab_size):
        raise ValueError(
            f"exchange: end_token must be one of the model's {config.vocab_size} tokens, got "
            f"{end_token!r}. Pass the end_id of its tokenizer."
        )
    mapping: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings and family.ties,
        "initializer_range": config.init_std,
        "residual_in_fp32": config.residual_dtype == "fp32",
        "bos_token_id": None,
        "eos_token_id": end_token,
        "pad_token_id": None,  # transformers would fill that token's embedding with zeros and not train it
    }
    if config.uses("-T"):
        mapping["intermediate_size"] = config.d_ffn
    if config.uses("*T"):
        mapping["num_attention_heads"] = config.num_heads
        mapping["num_key_value_heads"] = config.num_kv_heads
        mapping["head_dim"] = config.head_dim
    return mapping | (_hybrid(config) if family is NEMOTRON_H else _transformer(config))


def from_hf_config(mapping: Mapping[str, Any], clamp_time_steps: bool = True) -> ModelConfig:
    """The configuration from a config.json. clamp_time_steps: as transformers does, else as in Megatron-LM.

    Raises ValueError for model types and settings that are not supported here.
    """
    mapping = _Complete(mapping)
    family = family_named(mapping.get("model_type"))
    _require_supported(family, mapping)
    seq_len, eps = ABSENT[family.model_type]
    common: dict[str, Any] = {
        "vocab_size": mapping["vocab_size"],
        "d_model": mapping["hidden_size"],
        "max_seq_len": mapping.get("max_position_embeddings", seq_len),
        "activation": family.activation,
        "tie_embeddings": mapping.get("tie_word_embeddings", False) and family.ties,
        "init_std": mapping.get("initializer_range", 0.02),
        "residual_dtype": "fp32" if mapping.get("residual_in_fp32") else "bf16",
    }
    if family is NEMOTRON_H:
        return _from_hybrid(common, mapping, clamp_time_steps)
    heads = mapping["num_attention_heads"]
    return ModelConfig(
        **common,
        pattern="T" * mapping["num_hidden_layers"],
        d_ffn=mapping["intermediate_size"],
        num_heads=heads,
        num_kv_heads=mapping.get("num_key_value_heads") or heads,
        head_dim=mapping.get("head_dim") or mapping["hidden_size"] // heads,
        rope_theta=_rope_theta(mapping),
        norm_eps=mapping.get("rms_norm_eps", eps),
    )


class _Complete(dict[str, Any]):
    """A configuration that names a missing key in its error."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(
            f"exchange: a {self.get('model_type')} configuration must have {key!r}, which is missing."
        )


def _hybrid(config: ModelConfig) -> dict[str, Any]:
    mapping: dict[str, Any] = {
        "layers_block_type": [LAYER_TYPES[letter] for letter in config.pattern],
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": config.norm_eps,
    }
    if config.uses("M"):
        mapping |= {
            "mamba_num_heads": config.mamba_num_heads,
            "mamba_head_dim": config.mamba_head_dim,
            "ssm_state_size": config.state_size,
            "n_groups": config.num_groups,
            "conv_kernel": config.conv_width,
            "chunk_size": config.chunk_size,
            "time_step_min": max(config.min_time_step, NO_TIME_STEP_MIN),
        }
    return mapping


def _transformer(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_hidden_layers": len(config.pattern),
        "hidden_act": "silu" if config.activation == "swiglu" else "relu2",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }


def _from_hybrid(common: dict[str, Any], mapping: Mapping[str, Any], clamp: bool) -> ModelConfig:
    pattern = _pattern(mapping)
    if "-" in pattern:
        common["d_ffn"] = mapping["intermediate_size"]
    if "*" in pattern:
        common["num_heads"] = mapping["num_attention_heads"]
        common["num_kv_heads"] = mapping.get("num_key_value_heads") or mapping["num_attention_heads"]
        common["head_dim"] = mapping.get("head_dim") or mapping["attention_head_dim"]
    if "M" in pattern:
        smallest = mapping.get("time_step_min", 0.001) if clamp else 0.0
        common |= {
            "mamba_num_heads": mapping["mamba_num_heads"],
            "mamba_head_dim": mapping["mamba_head_dim"],
            "state_size": mapping["ssm_state_size"],
            "num_groups": mapping["n_groups"],
            "conv_width": mapping["conv_kernel"],
            "chunk_size": mapping["chunk_size"],
            "min_time_step": smallest if smallest > NO_TIME_STEP_MIN else 0.0,
        }
    return ModelConfig(**common, pattern=pattern, norm_eps=mapping.get("layer_norm_epsilon", 1e-5))


def _pattern(mapping: Mapping[str, Any]) -> str:
    """One letter per layer, from any of the spellings."""
    kinds = mapping.get("layers_block_type") or mapping.get("layer_types")
    letters: list[str] = list(mapping.get("hybrid_override_pattern", "")) if kinds is None else kinds
    found = "".join(LETTERS.get(kind, kind) for kind in letters)
    unknown = sorted(set(letters) - set(LETTERS) - set("M*-")) if found else ["none"]
    if unknown:
        raise ValueError(
            f"exchange: layers of a NemotronH must be Mamba-2, attention or mlp, got {', '.join(unknown)}."
        )
    return found


def _rope_theta(mapping: Mapping[str, Any]) -> float:
    rope = mapping.get("rope_parameters") or mapping.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            "exchange: rotary positions must be unscaled (rope_type 'default', all channels), "
            f"got {dict(rope)}."
        )
    return float(rope.get("rope_theta", mapping.get("rope_theta", 10000.0)))


def _require_supported(family: Family, mapping: Mapping[str, Any]) -> None:
    if quantized := mapping.get("quantization_config"):
        raise ValueError(
            f"exchange: weights must be floating-point, got quantized ones ({quantized}). "
            "Dequantize them first."
        )
    for key, allowed in ONLY[family.model_type].items():
        value = mapping.get(key, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"exchange: {key} of a {family.model_type} must be {allowed[0]!r}, got {value!r}: it is "
                "not supported here."
            )
