"""Import and export of transformers configurations. Settings that this model does not support are refused."""

from typing import Any

import torch

from fourbits.exchange.families import NEMOTRON_H, Family, family_named, family_of
from fourbits.exchange.fields import LARGEST_COUNT, MOST_LAYERS, Fields
from fourbits.exchange.hybrid import read_mamba, read_pattern, write_hybrid
from fourbits.exchange.rope import read_rope, write_rope
from fourbits.exchange.supported import ABSENT, require_supported
from fourbits.model.config import ModelConfig

LARGEST_VOCABULARY = 2**26


def to_hf_config(
    config: ModelConfig, dtype: torch.dtype = torch.bfloat16, end_token: int | None = None
) -> dict[str, Any]:
    """The content of config.json. dtype: of the weights; end_token: the token that ends a text.

    A hybrid with tied embeddings is exported with two equal tables, because NemotronH does not tie them.
    Document masking (`document_end`) has no counterpart in transformers: a sequence is one context. Raises
    ValueError for a model that no transformers class implements, and for an end_token outside the vocabulary.
    """
    family = family_of(config)
    if end_token is not None and (type(end_token) is not int or end_token not in range(config.vocab_size)):
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
        # transformers would set that token's embedding to zeros and not train it. The padding token is in
        # generation_config.json and in the tokenizer's files.
        "pad_token_id": None,
    }
    if config.uses("-T"):
        mapping["intermediate_size"] = config.d_ffn
    if config.uses("*T"):
        mapping["num_attention_heads"] = config.num_heads
        mapping["num_key_value_heads"] = config.num_kv_heads
        mapping["head_dim"] = config.head_dim
    return mapping | (write_hybrid(config) if family is NEMOTRON_H else _write_transformer(config, family))


def from_hf_config(mapping: object, clamp_time_steps: bool = True) -> ModelConfig:
    """The configuration from a config.json. clamp_time_steps: as transformers does; else as in Megatron-LM.

    Raises ValueError for model types and settings that are not supported here, and for values of the wrong
    type.
    """
    fields = Fields(mapping)
    family = family_named(fields.get("model_type"))
    require_supported(family, fields)
    absent = ABSENT[family.model_type]
    seq_len = fields.whole("max_position_embeddings", absent["max_position_embeddings"], most=LARGEST_COUNT)
    common: dict[str, Any] = {
        "vocab_size": fields.whole("vocab_size", most=LARGEST_VOCABULARY),
        "d_model": fields.whole("hidden_size"),
        "max_seq_len": seq_len,
        "activation": family.activation,
        "tie_embeddings": fields.flag("tie_word_embeddings", False) and family.ties,
        "init_std": fields.number("initializer_range", 0.02),
        "residual_dtype": "fp32" if fields.flag("residual_in_fp32", False) else "bf16",
    }
    eps = "layer_norm_epsilon" if family is NEMOTRON_H else "rms_norm_eps"
    common["norm_eps"] = fields.number(eps, absent["norm_eps"])
    if family is not NEMOTRON_H:
        return ModelConfig(**common, **_read_transformer(fields, family, seq_len))
    pattern = read_pattern(fields)
    if "-" in pattern:
        common["d_ffn"] = fields.whole("intermediate_size")
    if "*" in pattern:
        common |= _read_heads(fields, family)
    if "M" in pattern:
        common |= read_mamba(fields, clamp_time_steps)
    return ModelConfig(**common, pattern=pattern)


def _write_transformer(config: ModelConfig, family: Family) -> dict[str, Any]:
    written: dict[str, Any] = {
        "num_hidden_layers": len(config.pattern),
        "hidden_act": "silu" if config.activation == "swiglu" else "relu2",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": write_rope(config),
    }
    return written | ({"sliding_window": config.sliding_window} if family.windows else {})


def _read_transformer(fields: Fields, family: Family, seq_len: int) -> dict[str, Any]:
    theta, scaling = read_rope(fields, seq_len)
    window = None
    if (
        family.windows and fields.get("sliding_window", 0) is not None
    ):  # null means none, an absent key a default
        default = ABSENT[family.model_type]["sliding_window"]
        window = fields.whole("sliding_window", default, most=LARGEST_COUNT)
    return {
        **_read_heads(fields, family),
        "pattern": "T" * fields.whole("num_hidden_layers", most=MOST_LAYERS),
        "d_ffn": fields.whole("intermediate_size"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qk_norm": family.qk_norm,
        "sliding_window": window,
    }


def _read_heads(fields: Fields, family: Family) -> dict[str, Any]:
    """The attention heads. null means one KV head per query head, and the head_dim that d_model implies."""
    absent = ABSENT[family.model_type]
    heads = fields.whole("num_attention_heads")
    groups = absent.get("num_key_value_heads", heads)
    if "num_key_value_heads" in fields:
        groups = fields.whole("num_key_value_heads") if fields.has("num_key_value_heads") else heads
    if heads % groups:
        raise ValueError(
            f"exchange: num_attention_heads must be a multiple of num_key_value_heads ({groups}), got "
            f"{heads}. Correct config.json."
        )
    return {"num_heads": heads, "num_kv_heads": groups, "head_dim": _read_head_dim(fields, family, heads)}


def _read_head_dim(fields: Fields, family: Family, heads: int) -> int:
    if fields.has("head_dim"):
        return fields.whole("head_dim")
    if family is NEMOTRON_H:
        return fields.whole("attention_head_dim")  # the key's name in older files
    if "head_dim" not in fields and "head_dim" in ABSENT[family.model_type]:
        return ABSENT[family.model_type]["head_dim"]
    width = fields.whole("hidden_size")
    if width % heads:
        raise ValueError(
            f"exchange: hidden_size must be a multiple of num_attention_heads ({heads}) where head_dim "
            f"is absent, got {width}. Add head_dim to config.json, or correct one of the two."
        )
    return width // heads
