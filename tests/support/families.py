"""Random-init models of transformers families, small enough for a CPU: (model, inputs) by name.

Every family has two or more layers of width 32 and a loss on a fixed batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

hf: Any = transformers  # configs from tables, whose fields no type checker can follow

Inputs = Mapping[str, Any]
Family = Callable[[], tuple[nn.Module, Inputs]]

VOCABULARY = 96
TOKENS = (torch.arange(2 * 32).reshape(2, 32) * 5 + 7) % (VOCABULARY - 8) + 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
HEADS: dict[str, Any] = {**GROUPED, "head_dim": 8}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8}


def noise(*sizes: int) -> torch.Tensor:
    """The same numbers in every process, also for inputs that are made when this module is imported."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def causal(name: str, sizes: Mapping[str, Any], **more: Any) -> Family:
    """A causal language model whose class and config are called after the family."""
    return lambda: (
        of_config(name, "ForCausalLM", {**sizes, **more}),
        {"input_ids": TOKENS, "labels": TOKENS},
    )


def masked(name: str, sizes: Mapping[str, Any] = SIZES, **more: Any) -> Family:
    return lambda: (
        of_config(name, "ForMaskedLM", {**sizes, **more}),
        {"input_ids": TOKENS, "labels": TOKENS},
    )


def translating(name: str, **more: Any) -> Family:
    """A pair of encoder and decoder."""
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    inputs = {"input_ids": TOKENS, "labels": TOKENS}
    return lambda: (of_config(name, "ForConditionalGeneration", {**sizes, **more}), inputs)


def classifying(name: str, suffix: str, sizes: Mapping[str, Any], **inputs: Any) -> Family:
    return lambda: (of_config(name, suffix, sizes), {**inputs, "labels": torch.tensor([0, 1])})


def of_config(name: str, suffix: str, sizes: Mapping[str, Any]) -> nn.Module:
    config = getattr(
        hf, name.removesuffix("Text") + "Config" if not hasattr(hf, f"{name}Config") else f"{name}Config"
    )
    model = getattr(hf, name.removesuffix("Text") + suffix)
    return model(config(**sizes))


def t5() -> tuple[nn.Module, Inputs]:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config), {"input_ids": TOKENS, "labels": TOKENS}


def whisper() -> tuple[nn.Module, Inputs]:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=32,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return hf.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 8, 64),
        "labels": TOKENS,
    }


def llava() -> tuple[nn.Module, Inputs]:
    vision = hf.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
    )
    config = hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**HEADS), image_token_id=3)
    tokens = TOKENS.clone()
    tokens[:, :4] = 3
    inputs = {"input_ids": tokens, "labels": TOKENS, "pixel_values": torch.randn(2, 3, 16, 16)}
    return hf.LlavaForConditionalGeneration(config), inputs


def sound(name: str) -> Family:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "conv_dim": (16, 16),
        "conv_stride": (4, 4),
        "conv_kernel": (8, 8),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
        "apply_spec_augment": False,
        "classifier_proj_size": 32,
        "mask_time_prob": 0.0,
    }
    return classifying(name, "ForSequenceClassification", sizes, input_values=noise(2, 800))


IMAGES = noise(2, 3, 32, 32)
SEEN: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
STAGES: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
CLASSES = "ForImageClassification"
MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

FAMILIES: dict[str, Family] = {
    **{
        name: causal(name, HEADS)
        for name in (
            "Llama",
            "Mistral",
            "Qwen3",
            "Gemma",
            "Gemma2",
            "Granite",
            "Helium",
            "SmolLM3",
            "Arcee",
            "Ernie4_5",
            "Glm",
        )
    },
    **{
        name: causal(name, GROUPED)
        for name in ("Qwen2", "Olmo", "Olmo2", "StableLm", "Starcoder2", "Cohere", "Phi", "Phi3")
    },
    "Gemma3Text": causal("Gemma3Text", HEADS),
    "Nemotron": causal("Nemotron", HEADS),
    "Persimmon": causal("Persimmon", SIZES),
    "GPTNeoX": causal("GPTNeoX", SIZES),
    "GPT2": lambda: (hf.GPT2LMHeadModel(hf.GPT2Config(**GPT)), {"input_ids": TOKENS, "labels": TOKENS}),
    "GPTJ": causal("GPTJ", GPT, rotary_dim=8),
    "CodeGen": causal("CodeGen", GPT, rotary_dim=8),
    "GPTBigCode": causal("GPTBigCode", GPT),
    "GPTNeo": causal(
        "GPTNeo",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
        },
    ),
    "OPT": causal("OPT", {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "Bloom": causal("Bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "Falcon": causal("Falcon", {**SIZES, "alibi": False}),
    "Mpt": causal(
        "Mpt", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}
    ),
    "BioGpt": causal("BioGpt", SIZES),
    "Mixtral": causal("Mixtral", HEADS, num_local_experts=4),
    "Qwen2Moe": causal("Qwen2Moe", GROUPED, **EXPERTS, num_experts=4, shared_expert_intermediate_size=32),
    "Qwen3Moe": causal("Qwen3Moe", HEADS, **EXPERTS, num_experts=4),
    "Qwen3Next": causal(
        "Qwen3Next",
        HEADS,
        **EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "Olmoe": causal("Olmoe", GROUPED, num_experts=4, num_experts_per_tok=2),
    "DeepseekV3": causal(
        "DeepseekV3",
        {**SIZES, "num_key_value_heads": 4},
        **EXPERTS,
        **MLA,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "JetMoe": causal("JetMoe", {**SIZES, "num_key_value_heads": 2}, kv_channels=8, num_local_experts=4),
    "Mamba": causal("Mamba", MAMBA),
    "Mamba2": causal("Mamba2", MAMBA, num_heads=8, head_dim=8, n_groups=1, chunk_size=16),
    "NemotronH": causal(
        "NemotronH",
        HEADS,
        hybrid_override_pattern="M-*M-",
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=16,
    ),
    "Jamba": causal(
        "Jamba",
        GROUPED,
        num_experts=4,
        mamba_d_state=8,
        use_mamba_kernels=False,
        attn_layer_period=3,
        attn_layer_offset=1,
    ),
    "RecurrentGemma": causal("RecurrentGemma", HEADS, lru_width=32, attention_window_size=16),
    "XLNet": lambda: (
        hf.XLNetLMHeadModel(
            hf.XLNetConfig(vocab_size=VOCABULARY, d_model=32, n_layer=3, n_head=4, d_inner=64)
        ),
        {"input_ids": TOKENS, "labels": TOKENS},
    ),
    **{
        name: masked(name)
        for name in ("Bert", "Roberta", "Electra", "DebertaV2", "ModernBert", "Camembert", "RoFormer")
    },
    "Albert": masked("Albert", embedding_size=16),
    "MobileBert": masked("MobileBert", intra_bottleneck_size=16, embedding_size=32),
    "DistilBert": masked(
        "DistilBert", {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64}
    ),
    "Funnel": masked(
        "Funnel",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 64,
            "block_sizes": [2, 2],
        },
    ),
    "BertForQuestionAnswering": lambda: (
        hf.BertForQuestionAnswering(hf.BertConfig(**SIZES)),
        {"input_ids": TOKENS, "start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
    ),
    "LlamaForSequenceClassification": lambda: (
        hf.LlamaForSequenceClassification(hf.LlamaConfig(**HEADS)),
        {"input_ids": TOKENS, "labels": torch.tensor([0, 1])},
    ),
    "T5": t5,
    **{name: translating(name) for name in ("Bart", "Pegasus", "MBart")},
    "Whisper": whisper,
    "Llava": llava,
    **{name: sound(name) for name in ("Wav2Vec2", "WavLM", "Hubert")},
    **{
        name: classifying(name, CLASSES, SEEN, pixel_values=IMAGES)
        for name in ("ViT", "DeiT", "Dinov2", "Beit")
    },
    "Swin": classifying("Swin", CLASSES, STAGES, pixel_values=IMAGES),
    "ConvNext": classifying(
        "ConvNext",
        CLASSES,
        {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2},
        pixel_values=IMAGES,
    ),
}
