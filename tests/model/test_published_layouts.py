"""Parameters are the published models' under other names: transformers computes the same with them."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, NemotronHConfig, NemotronHForCausalLM

from model.shapes import random_tokens, small_model

NEMOTRON = {
    "embed.": "model.embeddings.",
    "head.": "lm_head.",
    "blocks.": "model.layers.",
    "conv_weight": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "norm_weight": "norm.weight",
}
LLAMA = {
    "embed.": "model.embed_tokens.",
    "head.": "lm_head.",
    "blocks.": "model.layers.",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.": "self_attn.",
    "ffn.": "mlp.",
}


def renamed(model, names, norm):
    state = {}
    for name, value in model.state_dict().items():
        new = norm if name == "norm.weight" else name
        for ours, theirs in names.items():
            new = new.replace(ours, theirs)
        state[new] = value
    return state


def assert_same_logits(ours, theirs, names, norm):
    theirs.load_state_dict(renamed(ours, names, norm), strict=True)
    tokens = random_tokens(2, 21)
    found = ours(tokens)
    wanted = theirs.eval()(tokens, use_cache=False).logits
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()  # FP32 through four blocks


def test_a_hybrid_is_a_nemotron_h_by_renames_alone():
    config = NemotronHConfig(
        vocab_size=64,
        hidden_size=48,
        layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"],
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=8,
        layer_norm_epsilon=1e-5,
    )
    model = small_model("M-*-")
    with (
        torch.no_grad()
    ):  # gains and groups that matter, and steps above the 0.001 that transformers clamps at
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(mean=1, std=0.2)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-3, 0)
    assert_same_logits(model, NemotronHForCausalLM(config).float(), NEMOTRON, "model.norm_f.weight")


def test_a_transformer_is_a_llama_by_renames_alone():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    model = small_model("TT", activation="swiglu", rope_theta=1e4)
    assert_same_logits(model, LlamaForCausalLM(config).float(), LLAMA, "model.norm.weight")
