"""Model presets, as data. A run replaces vocab_size with its tokenizer's.

- The models of arXiv:2509.25149 (section 5 and appendix A): `hybrid-12b`, `hybrid-8b`, `transformer-1.2b`.
  The paper does not state the vocabulary size or the positions of the attention blocks; both are those of the
  same group's released models (131,072; Nemotron-Nano-12B-v2, Nemotron-H-8B). Other values that it does not
  state are common ones: rotary base 10,000, norm epsilon 1e-5.
- `nemotron-nano-12b-v2`: the released model of that family, with fewer and wider Mamba heads.
- Llamas from `30m` to `1b`: up to 200m the shapes of a public comparison of 4-bit recipes
  (IST-DASLab/Quartet-II), extended by its rule (heads of 128, an FFN of 8/3 widths rounded up to 256).
- Hybrids from `hybrid-30m` to `hybrid-1.2b`: the 12B scaled down, with its FFN of four widths, states of 128
  and heads of 64. Each group has 16 Mamba heads, so that in_proj divides into blocks of 16.
"""

from dataclasses import replace

from fourbits.model.config import ModelConfig

PAPER_VOCABULARY = 131_072
PAPER_SEQ_LEN = 8192
COMPARED_VOCABULARY = 32_000


def _llama(blocks: int, d_model: int, d_ffn: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=COMPARED_VOCABULARY,
        d_model=d_model,
        pattern="T" * blocks,
        max_seq_len=2048,
        d_ffn=d_ffn,
        activation="swiglu",
        num_heads=d_model // 128,
        num_kv_heads=d_model // 128,
        head_dim=128,
        rope_theta=10000.0,
    )


def _hybrid(pattern: str, d_model: int, kv_heads: int, vocab_size: int = COMPARED_VOCABULARY) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        pattern=pattern,
        max_seq_len=PAPER_SEQ_LEN,
        d_ffn=4 * d_model,
        num_heads=d_model // 128,
        num_kv_heads=kv_heads,
        head_dim=128,
        mamba_num_heads=2 * d_model // 64,
        mamba_head_dim=64,
        num_groups=2 * d_model // 64 // 16,
    )


HYBRID_12B = ModelConfig(
    vocab_size=PAPER_VOCABULARY,
    d_model=5120,
    pattern="M-M-M-M*-" * 6 + "M-M-M-M-",
    max_seq_len=PAPER_SEQ_LEN,
    d_ffn=20480,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    mamba_num_heads=160,
)

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
    "30m": _llama(6, 640, 1792),
    "50m": _llama(7, 768, 2048),
    "100m": _llama(8, 1024, 2816),
    "200m": _llama(10, 1280, 3584),
    "400m": _llama(12, 1664, 4608),
    "1b": _llama(20, 2048, 5632),
    "hybrid-30m": _hybrid("M-M-M*-" * 2 + "M-M-", 512, kv_heads=2),
    "hybrid-50m": _hybrid("M-M-M*-" * 3 + "M-M-M-", 512, kv_heads=2),
    "hybrid-100m": _hybrid("M-M*-M-M-M*-M-", 1024, kv_heads=2),
    "hybrid-200m": _hybrid("M-M-M-M*-" * 3 + "M-", 1024, kv_heads=2),
    "hybrid-400m": _hybrid("M-M-M-M*-" * 2 + "M-M-M-", 1536, kv_heads=4),
    "hybrid-1b": _hybrid("M-M-M-M*-" * 3 + "M-M-M-M-", 2048, kv_heads=4),
    # To compare with transformer-1.2b: same vocabulary and width, and within 1 % the number of parameters.
    "hybrid-1.2b": _hybrid("M-M-M-M*-" * 3, 2048, kv_heads=4, vocab_size=PAPER_VOCABULARY),
    "transformer-1.2b": ModelConfig(
        vocab_size=PAPER_VOCABULARY,
        d_model=2048,
        pattern="T" * 20,
        max_seq_len=PAPER_SEQ_LEN,
        d_ffn=6144,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=10000.0,
    ),
    "hybrid-8b": ModelConfig(
        vocab_size=PAPER_VOCABULARY,
        d_model=4096,
        pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
        max_seq_len=PAPER_SEQ_LEN,
        d_ffn=21504,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        mamba_num_heads=128,
    ),
    "hybrid-12b": HYBRID_12B,
    "nemotron-nano-12b-v2": replace(HYBRID_12B, mamba_num_heads=128, mamba_head_dim=80),
}
