"""The configuration of a model: widths and block pattern, but not the precision of linear layers."""

from dataclasses import dataclass
from typing import Literal

# One letter per block.
BLOCKS = {"M": "Mamba-2", "*": "attention", "-": "FFN", "T": "Transformer: attention, then FFN"}
#: sizes that every model has
_ALWAYS = ("vocab_size", "d_model", "max_seq_len")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Rotary frequencies lowered for contexts longer than those of pretraining. Raises ValueError.

    linear (arXiv:2306.15595): all are divided by factor. llama3 (Llama 3.1): frequencies with more than
    high_freq_factor periods in original_seq_len tokens stay, those with fewer than low_freq_factor are
    divided by factor, and those in between are interpolated.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq_len: int = 8192

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ValueError(
                f"factor must be positive, got {self.factor}. Set it to the new context length / "
                "original_seq_len, such as 8."
            )
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "low_freq_factor must be positive and below high_freq_factor "
                f"({self.high_freq_factor}), got {self.low_freq_factor}. Llama 3 has 1 and 4."
            )
        if self.original_seq_len < 1:
            raise ValueError(
                f"original_seq_len must be at least 1, got {self.original_seq_len}. Set it to the length "
                "that the model was trained on, such as 8192."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A hybrid or a plain Transformer, by its pattern (one letter per block: M, *, - or T).

    Fields of parts that the pattern does not use keep their defaults and have no effect.
    """

    vocab_size: int
    d_model: int
    pattern: str
    max_seq_len: int = 8192
    """Longest sequence the model accepts."""

    d_ffn: int = 0
    activation: Literal["relu2", "swiglu"] = "relu2"

    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    rope_theta: float | None = None
    """Base of the rotary position embedding; None for no position embedding, as in the hybrids."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies, as in Llama 3.1; None for none."""
    qk_norm: bool = False
    """Whether every head of q and k is normalized, with a gain per channel, before it is rotated (Qwen3)."""
    sliding_window: int | None = None
    """The number of tokens, itself included, that a token attends to (Mistral); None for all before it."""

    mamba_num_heads: int = 0
    mamba_head_dim: int = 64
    state_size: int = 128
    num_groups: int = 8
    """Groups of Mamba heads; the heads of a group share B, C and the norm's statistics."""
    conv_width: int = 4
    chunk_size: int = 128
    """Tokens per chunk of the SSD scan; affects speed, not results."""
    min_time_step: float = 0.0
    """Lower bound of the scan's time steps dt. Megatron-LM has 0; transformers' NemotronH has 0.001 unless
    its configuration sets another."""

    document_end: int | None = None
    """The token that ends a document: attention, convolution and state do not cross it.
    None: a sequence is one context."""

    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    residual_dtype: Literal["bf16", "fp32"] = "bf16"
    init_std: float = 0.02

    def __post_init__(self) -> None:
        self._check_pattern()
        for name in (*_ALWAYS, *self._sizes_in_use()):
            if getattr(self, name) < 1:
                remedy = "Set it" if name in _ALWAYS else "Set it, or remove the blocks that need it"
                raise ValueError(
                    f"{name} must be at least 1 in a model with the pattern {self.pattern!r}, got "
                    f"{getattr(self, name)}. {remedy}."
                )
        if self.min_time_step < 0:
            raise ValueError(
                f"min_time_step must be at least 0, got {self.min_time_step}. Set it to 0 for no lower bound."
            )
        if self.document_end is not None and not 0 <= self.document_end < self.vocab_size:
            raise ValueError(
                f"document_end must be a token below vocab_size = {self.vocab_size}, got "
                f"{self.document_end}. Set it to the tokenizer's end token, or to null."
            )
        if self.uses("*T"):
            self._check_attention()
        if self.uses("M") and self.mamba_num_heads % self.num_groups:
            raise ValueError(
                f"mamba_num_heads must be a multiple of num_groups ({self.num_groups}), got "
                f"{self.mamba_num_heads}. Set num_groups to a number that divides it, such as 1."
            )

    def _check_pattern(self) -> None:
        if not self.pattern or set(self.pattern) - set(BLOCKS):
            letters = ", ".join(f"{letter} ({kind})" for letter, kind in BLOCKS.items())
            raise ValueError(
                f"pattern must be one letter per block, of {letters}; got {self.pattern!r}. Write it as in "
                "'M-M*M-'."
            )

    def _check_attention(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads ({self.num_kv_heads}), got "
                f"{self.num_heads}. Set num_kv_heads to a number that divides it, such as 1."
            )
        if self.rope_theta is not None and (self.head_dim % 2 or self.rope_theta <= 0):
            raise ValueError(
                f"rope_theta must be positive and head_dim even (rotations act on pairs), "
                f"got {self.rope_theta} and {self.head_dim}. Set rope_theta to null for no "
                "rotations."
            )
        if self.rope_scaling is not None and self.rope_theta is None:
            raise ValueError("rope_scaling needs rotary positions. Set rope_theta, or remove rope_scaling.")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"sliding_window must be at least 1, or null, got {self.sliding_window}. Set it to null for "
                "no window."
            )

    def _sizes_in_use(self) -> list[str]:
        sizes = ["d_ffn"] if self.uses("-T") else []
        sizes += ["num_heads", "num_kv_heads", "head_dim"] if self.uses("*T") else []
        mamba = ["mamba_num_heads", "mamba_head_dim", "state_size", "num_groups", "conv_width", "chunk_size"]
        return sizes + (mamba if self.uses("M") else [])

    def uses(self, letters: str) -> bool:
        """Whether the pattern has any of these blocks."""
        return any(letter in self.pattern for letter in letters)

    @property
    def d_mamba(self) -> int:
        """Inner width of a Mamba-2 mixer."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def d_conv(self) -> int:
        """Channels of the causal convolution: x, B and C concatenated."""
        return self.d_mamba + 2 * self.num_groups * self.state_size

    @property
    def d_in_proj(self) -> int:
        """Output width of a Mamba-2 mixer's in_proj: z, x, B, C and dt concatenated."""
        return self.d_mamba + self.d_conv + self.mamba_num_heads

    @property
    def num_residual_branches(self) -> int:
        """Number of branches added to the residual stream: two per Transformer block, else one."""
        return len(self.pattern) + self.pattern.count("T")
