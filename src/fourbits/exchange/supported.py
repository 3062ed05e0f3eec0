"""Settings of transformers without a counterpart here, and transformers' defaults for absent keys."""

from typing import Any

from fourbits.exchange.families import Family
from fourbits.exchange.fields import Fields
from fourbits.exchange.shown import shown

#: model type -> setting -> the values that are accepted. An absent key counts as accepted.
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
    "mistral": {
        "hidden_act": ("silu",),
        "attention_dropout": (0,),
    },
    "qwen3": {
        "attention_bias": (False,),
        "hidden_act": ("silu",),
        "attention_dropout": (0,),
        "use_sliding_window": (
            False,
        ),  # applies to the blocks from max_window_layers on; here all blocks have a window or none has
    },
    "arcee": {
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "hidden_act": ("relu2",),
        "attention_dropout": (0,),
    },
}

#: transformers' defaults for absent keys, where all models of the type share one
ABSENT: dict[str, dict[str, Any]] = {
    "nemotron_h": {"max_position_embeddings": 4096, "norm_eps": 1e-5, "num_key_value_heads": 8},
    "llama": {"max_position_embeddings": 2048, "norm_eps": 1e-6},
    "mistral": {
        "max_position_embeddings": 4096 * 32,
        "norm_eps": 1e-6,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "norm_eps": 1e-6,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "arcee": {"max_position_embeddings": 4096, "norm_eps": 1e-5},
}


def require_supported(family: Family, config: Fields) -> None:
    """Raise ValueError naming a setting that is not supported here."""
    if quantized := config.get("quantization_config"):
        raise ValueError(
            f"exchange: weights must be floating-point, got quantized ones ({shown(quantized)}). "
            "Dequantize them first."
        )
    for key, allowed in ONLY[family.model_type].items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"exchange: {key} of a {family.model_type} must be {allowed[0]!r}, got {shown(value)}. "
                "Convert the transformers model in place: fourbits.convert(model)."
            )
    types = config.get("layer_types")
    if family.model_type == "qwen3" and types and any(kind != "full_attention" for kind in _each(types)):
        raise ValueError(
            f"exchange: layer_types of a qwen3 must all be 'full_attention', got {shown(types)}. "
            "Convert the transformers model in place: fourbits.convert(model)."
        )


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
