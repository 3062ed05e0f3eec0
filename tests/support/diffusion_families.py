"""Small random-init models of diffusers, some with fused projections: (model, inputs) by name.

Their attention calls its layers in another object, a processor, which fusing projections replaces.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# pyright: reportMissingImports=false

Inputs = dict[str, Any]
Family = Callable[[], tuple[nn.Module, Inputs]]

WIDTHS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3}
JOINT: dict[str, Any] = {**WIDTHS, "joint_attention_dim": 32}
SQUARE: dict[str, Any] = {"sample_size": 8, "patch_size": 2, "in_channels": 4}
UNET: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
    "norm_num_groups": 8,
}
TIMES = torch.tensor([0.5, 0.2])
STEPS = torch.tensor([5, 2])


def batch(*sizes: int) -> Tensor:
    return torch.randn(2, *sizes, generator=torch.Generator().manual_seed(sum(sizes)))


TEXT: Inputs = {"encoder_hidden_states": batch(8, 32)}
IMAGE: Inputs = {**TEXT, "hidden_states": batch(4, 8, 8), "timestep": STEPS}
VIDEO: Inputs = {**TEXT, "hidden_states": batch(4, 2, 8, 8), "timestep": STEPS}
POOLED: Inputs = {"pooled_projections": batch(32)}


def patches(axes: int) -> Inputs:
    """An image as a sequence, with positions along so many axes."""
    where = {"img_ids": torch.zeros(16, axes), "txt_ids": torch.zeros(8, axes)}
    return {**TEXT, **where, "hidden_states": batch(16, 16), "timestep": TIMES}


#: name -> (class, sizes, inputs)
MODELS: dict[str, tuple[str, dict[str, Any], Inputs]] = {
    "Flux": (
        "FluxTransformer2DModel",
        {**JOINT, "patch_size": 1, "in_channels": 16, "num_single_layers": 3}
        | {"pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]},
        {**patches(3), **POOLED},
    ),
    "Flux2": (
        "Flux2Transformer2DModel",
        {**JOINT, "patch_size": 1, "in_channels": 16, "num_single_layers": 3}
        | {"axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 32},
        {**patches(4), "guidance": torch.ones(2)},
    ),
    "Chroma": (
        "ChromaTransformer2DModel",
        {**JOINT, "patch_size": 1, "in_channels": 16, "num_single_layers": 3, "axes_dims_rope": (4, 4, 8)}
        | {"approximator_num_channels": 16, "approximator_hidden_dim": 32, "approximator_layers": 2},
        patches(3),
    ),
    "SD3": (
        "SD3Transformer2DModel",
        {**JOINT, **SQUARE, "out_channels": 4, "pos_embed_max_size": 8}
        | {"caption_projection_dim": 32, "pooled_projection_dim": 32},
        {**IMAGE, **POOLED},
    ),
    "AuraFlow": (
        "AuraFlowTransformer2DModel",
        {**SQUARE, "num_mmdit_layers": 2, "num_single_dit_layers": 3, "attention_head_dim": 16}
        | {"num_attention_heads": 2, "joint_attention_dim": 32, "caption_projection_dim": 32}
        | {"out_channels": 4, "pos_embed_max_size": 64},
        {**IMAGE, "timestep": TIMES},
    ),
    "PixArt": (
        "PixArtTransformer2DModel",
        {**WIDTHS, **SQUARE, "cross_attention_dim": 32, "caption_channels": 32, "out_channels": 8}
        | {"use_additional_conditions": False},
        {**IMAGE, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "DiT": (
        "DiTTransformer2DModel",
        {**WIDTHS, **SQUARE, "out_channels": 8, "num_embeds_ada_norm": 10},
        {"hidden_states": batch(4, 8, 8), "timestep": STEPS, "class_labels": torch.tensor([1, 2])},
    ),
    "Wan": (
        "WanTransformer3DModel",
        {**WIDTHS, "patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": 32}
        | {"freq_dim": 32, "ffn_dim": 64, "cross_attn_norm": True, "rope_max_seq_len": 32},
        VIDEO,
    ),
    "Mochi": (
        "MochiTransformer3DModel",
        {**WIDTHS, "patch_size": 2, "pooled_projection_dim": 16, "in_channels": 4, "text_embed_dim": 32}
        | {"time_embed_dim": 32, "max_sequence_length": 8},
        {**VIDEO, "encoder_attention_mask": torch.ones(2, 8, dtype=torch.bool)},
    ),
    "CogVideoX": (
        "CogVideoXTransformer3DModel",
        {**WIDTHS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 32, "text_embed_dim": 32}
        | {"sample_width": 8, "sample_height": 8, "sample_frames": 9, "patch_size": 2}
        | {"temporal_compression_ratio": 4, "max_text_seq_length": 8},
        {**IMAGE, "hidden_states": batch(1, 4, 8, 8)},
    ),
    "QwenImage": (
        "QwenImageTransformer2DModel",
        {**JOINT, "patch_size": 2, "in_channels": 16, "out_channels": 4, "axes_dims_rope": (4, 4, 8)},
        {**TEXT, "hidden_states": batch(16, 16), "timestep": TIMES, "img_shapes": [[(1, 4, 4)]] * 2}
        | {"encoder_hidden_states_mask": torch.ones(2, 8, dtype=torch.bool)},
    ),
    "UNet2DCondition": (
        "UNet2DConditionModel",
        {**UNET, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
        | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        {**TEXT, "sample": batch(4, 16, 16), "timestep": STEPS},
    ),
    "AutoencoderKL": (
        "AutoencoderKL",
        {"block_out_channels": (32, 64), "norm_num_groups": 8, "latent_channels": 4}
        | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": batch(3, 16, 16)},
    ),
}
#: those that are tried with fused projections, too, and with the old ones again
FUSED = ("Flux", "Flux2", "SD3", "AuraFlow", "PixArt", "Wan", "CogVideoX", "QwenImage") + (
    "UNet2DCondition",
    "AutoencoderKL",
)
UNFUSED = ("Flux", "SD3", "Wan", "UNet2DCondition")


def diffusion(name: str, then: Iterable[str] = ()) -> Family:
    """A model of diffusers with random weights, after calls of the methods `then`."""
    kind, sizes, inputs = MODELS[name]

    def made() -> tuple[nn.Module, Inputs]:
        import diffusers

        model = getattr(diffusers, kind)(**sizes)
        for method in then:
            getattr(model, method)()
        return model, inputs

    return made


FUSE, UNFUSE = "fuse_qkv_projections", "unfuse_qkv_projections"
DIFFUSION: dict[str, Family] = {
    **{name: diffusion(name) for name in MODELS},
    **{f"{name}-fused": diffusion(name, [FUSE]) for name in FUSED},
    **{f"{name}-unfused": diffusion(name, [FUSE, UNFUSE]) for name in UNFUSED},
}
