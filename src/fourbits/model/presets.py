"""Model presets, as data. A run replaces vocab_size by its tokenizer's."""

from fourbits.model.config import ModelConfig

MODEL_PRESETS: dict[str, ModelConfig] = {
    # The demo's hybrid: every kind of mixer of the paper's 12B, small enough for two CPU cores.
    "tiny": ModelConfig(
        vocab_size=2048,
        d_model=128,
        pattern="M-M-*-M-",
        max_seq_len=2048,
        d_ffn=384,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mamba_num_heads=16,
        mamba_head_dim=16,
        state_size=32,
        num_groups=1,
        chunk_size=32,
    ),
    # The Llama of the public small-scale comparisons of 4-bit recipes (IST-DASLab/Quartet-II): 30,482,560
    # parameters besides embedding and head.
    "30m": ModelConfig(
        vocab_size=32000,
        d_model=640,
        pattern="TTTTTT",
        max_seq_len=2048,
        d_ffn=1792,
        activation="swiglu",
        num_heads=5,
        num_kv_heads=5,
        head_dim=128,
        rope_theta=10000.0,
    ),
}
