"""The part of a NemotronH configuration that a Transformer does not have: the pattern and Mamba-2.

Time steps differ. transformers' NemotronH clamps every time step dt to at least `time_step_min`
(0.001 by default) in training and prefill, but not in single-token decoding. Megatron-LM, which trained the
published models, never clamps. So an export writes a `time_step_min` too small to have an effect, and an
import either follows transformers or does not clamp.
"""

from typing import Any

from fourbits.exchange.fields import MOST_LAYERS, Fields
from fourbits.exchange.shown import shown
from fourbits.model.config import ModelConfig

# transformers takes the logarithm of time_step_min, so it cannot be 0. A step of 1e-30 adds nothing in FP32.
NO_TIME_STEP_MIN = 1e-30

LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "M": "M",
    "*": "*",
    "-": "-",
}
LAYER_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
EXPERTS = ("moe", "E")


def write_hybrid(config: ModelConfig) -> dict[str, Any]:
    """The keys of a NemotronH configuration that a Transformer's does not have."""
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


def read_mamba(config: Fields, clamp_time_steps: bool) -> dict[str, Any]:
    """The fields of a ModelConfig that describe its Mamba-2 mixers."""
    smallest = config.number("time_step_min", 0.001) if clamp_time_steps else 0.0
    heads, groups = config.whole("mamba_num_heads"), config.whole("n_groups")
    if heads % groups:
        raise ValueError(
            f"exchange: mamba_num_heads must be a multiple of n_groups ({groups}), got {heads}. Correct "
            "config.json."
        )
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": config.whole("mamba_head_dim"),
        "state_size": config.whole("ssm_state_size"),
        "num_groups": groups,
        "conv_width": config.whole("conv_kernel"),
        "chunk_size": config.whole("chunk_size"),
        "min_time_step": smallest if smallest > NO_TIME_STEP_MIN else 0.0,
    }


def read_pattern(config: Fields) -> str:
    """One letter per layer, from any of the spellings. Raises ValueError for unsupported layers."""
    key = next((key for key in ("layers_block_type", "layer_types") if config.has(key)), None)
    key = key or "hybrid_override_pattern"
    kinds = config.get(key) or ()
    if not isinstance(kinds, str | list | tuple) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(
            f"exchange: {key} must list the kinds of layers, got {shown(kinds)}. Correct config.json."
        )
    unknown = sorted(set(kinds) - set(LETTERS)) if kinds else ["none"]
    if not unknown and len(kinds) <= MOST_LAYERS:
        return "".join(LETTERS[kind] for kind in kinds)
    if set(unknown) & set(EXPERTS):
        raise ValueError(
            f"exchange: {key} must not have layers of experts (moe), which are not supported here. Convert "
            "the transformers model instead: fourbits.convert(model)."
        )
    raise ValueError(
        f"exchange: layers of a NemotronH must be Mamba-2, attention or mlp, and at most {MOST_LAYERS}, "
        f"got {shown(', '.join(unknown) or len(kinds))}. Correct config.json, or convert the "
        "transformers model: fourbits.convert(model)."
    )
