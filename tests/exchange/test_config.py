"""Configurations, exported and imported through transformers' own classes."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from exchange.exchanged import MAMBA, OURS, SIZES
from fourbits.exchange.config import from_hf_config, to_hf_config
from fourbits.exchange.supported import ONLY
from fourbits.model.config import RopeScaling
from fourbits.model.counts import count_parameters
from fourbits.model.presets import MODEL_PRESETS
from model.shapes import small_config

HYBRID = {"model_type": "nemotron_h", **SIZES, **MAMBA, "conv_kernel": 4, "layer_norm_epsilon": 1e-5}
LLAMA = {"model_type": "llama", **SIZES, "num_hidden_layers": 3, "rms_norm_eps": 1e-6}
QWEN3 = {**LLAMA, "model_type": "qwen3"}
HEADS = "num_key_value_heads"
#: transformers' settings that change the computation or the training
LACKING = {
    "nemotron_h": (
        *("use_bias", "attention_bias", "mlp_bias", "mamba_proj_bias", "use_conv_bias"),
        *("mlp_hidden_act", "mamba_hidden_act", "sliding_window", "num_nextn_predict_layers"),
        *("attention_dropout", "hidden_dropout"),
    ),
    "llama": ("attention_bias", "mlp_bias", "hidden_act", "attention_dropout", "pretraining_tp"),
    "mistral": ("hidden_act", "attention_dropout"),
    "qwen3": ("attention_bias", "hidden_act", "attention_dropout", "use_sliding_window"),
    "arcee": ("attention_bias", "mlp_bias", "hidden_act", "attention_dropout"),
}


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_every_preset_survives_export_and_import(name):
    described = to_hf_config(MODEL_PRESETS[name], end_token=3)
    there = AutoConfig.for_model(described.pop("model_type"), **described)
    assert (there.eos_token_id, there.pad_token_id) == (3, None)
    assert there.dtype == torch.bfloat16
    assert from_hf_config(there.to_dict()) == MODEL_PRESETS[name]


@pytest.mark.parametrize(
    "changes",
    [
        {"residual_dtype": "fp32"},
        {"min_time_step": 0.01},
        {"init_std": 0.01},
        {"norm_eps": 1e-4},
        {"conv_width": 3},
        {**OURS["llama"], "norm_eps": 1e-4},
        {**OURS["llama"], "tie_embeddings": True},
        *OURS.values(),
    ],
    ids=str,
)
def test_every_option_survives(changes):
    config = small_config(**changes)
    described = to_hf_config(config)
    there = AutoConfig.for_model(described.pop("model_type"), **described)
    assert from_hf_config(there.to_dict()) == config


def test_the_pattern_is_read_in_every_spelling():
    kinds = {"linear_attention": "mamba", "full_attention": "attention", "mlp": "mlp"}
    old_names = [kinds[kind] for kind in MAMBA["layers_block_type"]]
    without = {key: value for key, value in HYBRID.items() if key != "layers_block_type"}
    for spelling in (
        {"layers_block_type": MAMBA["layers_block_type"]},
        {"layer_types": old_names},
        {"hybrid_override_pattern": "M-*-"},
    ):
        assert from_hf_config({**without, **spelling}).pattern == "M-*-"


LLAMA_1B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "rope_type": "llama3",
        "original_max_position_embeddings": 8192,
    },
}
QWEN_600M: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 40960,
}
MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}


@pytest.mark.parametrize(
    ("published", "size"),
    [(LLAMA_1B, 1_235_814_400), (QWEN_600M, 596_049_920), (MISTRAL_7B, 7_241_732_096)],
    ids=["Llama 3.2 1B", "Qwen3 0.6B", "Mistral 7B v0.1"],
)
def test_configurations_as_published_are_read_whole(published, size):
    config = from_hf_config(published)
    assert sum(count_parameters(config).values()) == size
    with torch.device("meta"):
        there = AutoModelForCausalLM.from_config(AutoConfig.for_model(**published))
    assert sum(parameter.numel() for parameter in there.parameters()) == size
    assert from_hf_config(to_hf_config(config)) == config


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", [[], 0, "", False, [1], "linear"])
def test_rotary_settings_that_are_no_mapping_are_refused_by_name(key, value):
    other = {"rope_scaling": {"rope_type": "default"}} if key == "rope_parameters" else {}
    with pytest.raises(ValueError, match=f"exchange: {key} must be a mapping or null, got"):
        from_hf_config({**LLAMA, **other, key: value})
    assert from_hf_config({**LLAMA, key: {}}) == from_hf_config({**LLAMA, key: None})


def test_the_rotary_base_is_read_in_both_spellings():
    new = from_hf_config({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    old = from_hf_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": None})
    assert new.rope_theta == old.rope_theta == 5e5


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({**LLAMA, "attention_bias": True}, "attention_bias of a llama must be False, got True"),
        ({**LLAMA, "rope_parameters": {"rope_type": "yarn"}}, "rope_type must be one of .*, got 'yarn'"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type must be .*, got 'dynamic'"),
        ({**LLAMA, "rope_parameters": {"rope_type": "longrope"}}, "rope_type must be one of .*'longrope'"),
        ({**LLAMA, "rope_parameters": {"rope_type": "llama3"}}, "configuration must have 'factor'"),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({**LLAMA, "rope_parameters": {"full_attention": {}}}, "must be the same for all layers"),
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types of a qwen3 must"),
        (
            {**LLAMA, "quantization_config": {"quant_method": "fp8"}},
            "must be floating-point, got quantized.*'fp8'",
        ),
        ({**HYBRID, "use_conv_bias": False}, "use_conv_bias of a nemotron_h must be True, got False"),
        ({**HYBRID, "layers_block_type": ["moe", "mlp"]}, r"must not have layers of experts \(moe\)"),
        (
            {**HYBRID, "layers_block_type": None, "hybrid_override_pattern": "ME"},
            "must not have layers of exp",
        ),
        ({**HYBRID, "layers_block_type": ["conv"]}, "must be Mamba-2, attention or mlp, .* got 'conv'"),
        ({**HYBRID, "layers_block_type": None}, "must be Mamba-2, attention or mlp, .* got 'none'"),
        (
            {**LLAMA, "model_type": None},
            "model_type must be one of nemotron_h, llama, mistral, qwen3, arcee, got",
        ),
        ({"model_type": "llama"}, "the configuration must have 'vocab_size'"),
    ],
)
def test_unsupported_settings_are_refused_by_name(mapping, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config(mapping)


@pytest.mark.parametrize("end_token", ["<|endoftext|>", -1, MODEL_PRESETS["tiny"].vocab_size])
def test_an_end_token_outside_the_vocabulary_is_refused(end_token):
    with pytest.raises(ValueError, match=r"end_token must be one of the model's 2048 tokens, got .*end_id"):
        to_hf_config(MODEL_PRESETS["tiny"], end_token=end_token)


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind in LACKING for key in LACKING[kind]])
def test_each_setting_without_a_counterpart_is_refused_by_name(kind, key):
    mapping: dict[str, Any] = {"nemotron_h": HYBRID, "llama": LLAMA}.get(kind, {**LLAMA, "model_type": kind})
    assert from_hf_config(mapping) == from_hf_config({**mapping, key: ONLY[kind][key][0]})
    for other in ("other", 7, True, False):
        if other not in ONLY[kind][key]:
            with pytest.raises(ValueError, match=f"{key} of a {kind} must be"):
                from_hf_config({**mapping, key: other})


@pytest.mark.parametrize("kind", ONLY)
def test_absent_keys_mean_what_they_mean_in_transformers(kind):
    """32 heads and 64 groups at most, which suit the number of heads that a type may have by default."""
    eps = "layer_norm_epsilon" if kind == "nemotron_h" else "rms_norm_eps"
    mapping: dict[str, Any] = {"nemotron_h": HYBRID}.get(kind, {**LLAMA, "model_type": kind})
    mapping = {**mapping, "hidden_size": 64, "num_attention_heads": 32}
    absent: dict[str, Any] = {
        key: value for key, value in mapping.items() if key not in (eps, "head_dim", HEADS)
    }
    there = AutoConfig.for_model(**absent)
    if kind == "nemotron_h":
        absent["attention_head_dim"] = there.head_dim  # its name in older files of hybrids
    found = from_hf_config(absent)
    assert found.norm_eps == getattr(there, eps)
    assert found.max_seq_len == there.max_position_embeddings
    assert found.num_kv_heads == there.num_key_value_heads
    assert found.head_dim == there.head_dim
    assert found.init_std == there.initializer_range
    assert found.tie_embeddings == there.tie_word_embeddings
    assert found.min_time_step == getattr(there, "time_step_min", 0)
    assert found.sliding_window == (there.sliding_window if kind == "mistral" else None)
    assert found.rope_theta == (None if kind == "nemotron_h" else there.rope_parameters["rope_theta"])
    null: dict[str, Any] = {**absent, HEADS: None}
    assert from_hf_config(null).num_kv_heads == 32
    if kind not in ("nemotron_h", "mistral"):  # which refuse null
        assert AutoConfig.for_model(**null).num_key_value_heads == 32


def test_a_window_that_is_null_is_none():
    mistral: dict[str, Any] = {**LLAMA, "model_type": "mistral", "sliding_window": None}
    assert from_hf_config(mistral).sliding_window is None
    assert AutoConfig.for_model(**mistral).sliding_window is None
    assert to_hf_config(from_hf_config(mistral))["model_type"] == "llama"


@pytest.mark.parametrize("place", ["inside", "beside", "absent"])
def test_the_length_before_scaling_is_read_where_transformers_reads_it(place):
    scaling = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    key = "original_max_position_embeddings"
    mapping: dict[str, Any] = {**LLAMA, "max_position_embeddings": 512, "rope_theta": 5e5}
    mapping["rope_scaling"] = scaling | ({} if place == "absent" else {key: 64})
    mapping |= {key: 32} if place == "beside" else {}
    there = AutoConfig.for_model(**mapping)
    AutoModelForCausalLM.from_config(there)  # which looks for it once more
    wanted = there.rope_parameters[key]
    found = from_hf_config(mapping)
    assert found.rope_scaling == RopeScaling(kind="llama3", factor=8.0, original_seq_len=wanted)
    assert wanted == {"inside": 64, "beside": 32, "absent": 512}[place]
    assert found.rope_theta == 5e5


@pytest.mark.parametrize(
    "changes",
    [
        {"pattern": "MT"},
        {"pattern": "M-", "activation": "swiglu"},
        {"pattern": "*-", "rope_theta": 1e4},
        {"pattern": "*-", "sliding_window": 4},
        {**OURS["mistral"], "qk_norm": True},
        {**OURS["relu2 transformer"], "sliding_window": 4},
        {**OURS["relu2 transformer"], "num_heads": 5, "num_kv_heads": 1},
    ],
    ids=str,
)
def test_a_model_that_transformers_lacks_is_refused(changes):
    with pytest.raises(ValueError, match="no supported transformers class has the pattern"):
        to_hf_config(small_config(**changes))
