"""The transformers class of a model, and the names of its parameters there.

Shapes and channel orders are the same, so import and export only rename: in both, in_proj is z, x, B, C, dt,
and rotations pair channel i with channel i + P/2.

    our pattern   activation   positions   attention        transformers
    M, *, -       relu2        none        full             NemotronHForCausalLM
    T             swiglu       rotary      full             LlamaForCausalLM
    T             swiglu       rotary      sliding window   MistralForCausalLM
    T             swiglu       rotary      heads normed     Qwen3ForCausalLM
    T             relu2        rotary      full             ArceeForCausalLM (a Llama with this FFN)

A Mistral without a window is a Llama and is written as one, unless the number of heads does not divide the
width, because transformers refuses such a Llama. NemotronH's attention has no positions, so positions are not
scaled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fourbits.exchange.shown import shown
from fourbits.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Family:
    """A transformers class. embedding, final_norm: names after the prefix; inside_block: our name -> theirs.

    ties: whether the class can tie embedding and head. windows: whether its attention can have a sliding
    window; qk_norm: whether it normalizes heads; any_width: whether hidden_size need not be a multiple of the
    number of heads. prefixes: prefixes of all names except the head's; the first one is written, all are
    read.
    """

    model_type: str
    architecture: str
    letters: str
    activation: Literal["relu2", "swiglu"]
    rotary: bool
    embedding: str
    final_norm: str
    inside_block: Mapping[str, str]
    ties: bool = True
    windows: bool = False
    qk_norm: bool = False
    any_width: bool = False
    prefixes: tuple[str, ...] = ("model.",)

    def their_name(self, name: str, prefix: str) -> str:
        """The name in transformers of one of our parameters."""
        if name == "head.weight":
            return "lm_head.weight"
        if not name.startswith("blocks."):
            return prefix + {"embed.weight": self.embedding, "norm.weight": self.final_norm}[name]
        _, index, inner = name.split(".", 2)
        ours = next((start for start in self.inside_block if inner.startswith(start)), "")
        inner = self.inside_block.get(ours, "") + inner.removeprefix(ours)
        return f"{prefix}layers.{index}.{inner}"


NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    letters="M*-",
    activation="relu2",
    rotary=False,
    embedding="embeddings.weight",
    final_norm="norm_f.weight",
    inside_block={
        "mixer.conv_weight": "mixer.conv1d.weight",
        "mixer.conv_bias": "mixer.conv1d.bias",
        "mixer.norm_weight": "mixer.norm.weight",
    },
    any_width=True,
    ties=False,  # even if tie_word_embeddings is true
    prefixes=("model.", "backbone."),  # NVIDIA's older checkpoints use backbone
)
LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    letters="T",
    activation="swiglu",
    rotary=True,
    embedding="embed_tokens.weight",
    final_norm="norm.weight",
    inside_block={
        "attention_norm.": "input_layernorm.",
        "ffn_norm.": "post_attention_layernorm.",
        "attention.": "self_attn.",
        "ffn.": "mlp.",
    },
)
ARCEE = replace(LLAMA, model_type="arcee", architecture="ArceeForCausalLM", activation="relu2")
MISTRAL = replace(
    LLAMA, model_type="mistral", architecture="MistralForCausalLM", windows=True, any_width=True
)
QWEN3 = replace(LLAMA, model_type="qwen3", architecture="Qwen3ForCausalLM", qk_norm=True, any_width=True)
FAMILIES = (NEMOTRON_H, LLAMA, MISTRAL, QWEN3, ARCEE)  # an export writes the first that fits


def family_of(config: ModelConfig) -> Family:
    """The class that implements this model. Raises ValueError if no supported class does."""
    for family in FAMILIES:
        if _computes(family, config):
            return family
    known = "; ".join(
        f"{f.architecture}: blocks {f.letters}, {f.activation}, {'rotary' if f.rotary else 'no'} positions"
        + (", sliding window" if f.windows else "")
        + (", qk_norm" if f.qk_norm else "")
        for f in FAMILIES
    )
    positions = "no" if config.rope_theta is None else "rotary"
    more = "" if config.sliding_window is None else ", a sliding window"
    more += ", qk_norm" if config.qk_norm else ""
    if config.uses("*T") and config.d_model % config.num_heads:
        more += f", and {config.num_heads} heads, which do not divide the width {config.d_model}"
    raise ValueError(
        f"exchange: no supported transformers class has the pattern {config.pattern!r} with "
        f"{config.activation} and {positions} positions{more}. Supported: {known}."
    )


def _computes(family: Family, config: ModelConfig) -> bool:
    if set(config.pattern) - set(family.letters):
        return False
    if config.uses("-T") and config.activation != family.activation:
        return False
    if not config.uses("*T"):
        return True
    same_positions = (config.rope_theta is not None) == family.rotary
    same_window = config.sliding_window is None or family.windows
    fits = family.any_width or config.d_model % config.num_heads == 0
    return same_positions and same_window and fits and config.qk_norm == family.qk_norm


def family_named(model_type: object) -> Family:
    """The family of a configuration's model_type. Raises ValueError if it is not supported."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    names = ", ".join(family.model_type for family in FAMILIES)
    raise ValueError(
        f"exchange: model_type must be one of {names}, got {shown(model_type)}. Convert the transformers "
        "model in place with fourbits.convert(model)."
    )
