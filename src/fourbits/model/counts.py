"""Parameters and training FLOPs of a configuration, per kind of work, without building the model.

FLOPs are per token, of a forward and a backward pass (twice the forward); a multiply-add counts as two:

- a linear layer of [N, K]: 6 N K;
- causal attention over T tokens: a query attends to K = (T + 1) / 2 keys on average, with a score and a
  weighted sum for each: 12 K H P; fewer with a sliding window;
- the SSD scan in chunks of Q tokens: a token attends to (Q + 1) / 2 of its chunk on average: scores
  3 (Q + 1) G N, weighted sums 3 (Q + 1) H P, and writing and reading the state, 6 H P N each;
- the convolution: 6 W per channel.

Masked halves, elementwise work and recomputation are not counted. So a utilization from these counts is a
lower bound, and a kernel gets no credit for computing masked entries.
"""

import functools
from collections import Counter

from fourbits.model.config import ModelConfig

# Kinds of parameters. A recipe can quantize those of kind "linear" only.
PARAMETER_KINDS = ("embedding", "linear", "head", "norm", "conv", "scan")
FLOP_KINDS = ("linear", "head", "attention", "scan", "conv")


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Number of parameters by PARAMETER_KINDS; a tied head counts as embedding."""
    return dict(_parameters(config))


@functools.lru_cache(maxsize=256)
def _parameters(config: ModelConfig) -> dict[str, int]:
    """Cached, because `fourbits plan` needs them for every layout. The caller must not change the dict."""
    counts: Counter[str] = Counter(dict.fromkeys(PARAMETER_KINDS, 0))
    d = config.d_model
    counts["embedding"] = config.vocab_size * d
    counts["head"] = 0 if config.tie_embeddings else config.vocab_size * d
    counts["norm"] = d * (config.num_residual_branches + 1)
    for letter in config.pattern:
        counts["linear"] += linear_parameters(config, letter)
    mixers = config.pattern.count("M")
    counts["norm"] += mixers * config.d_mamba
    counts["norm"] += 2 * config.head_dim * _attentions(config) if config.qk_norm else 0
    counts["conv"] += mixers * config.d_conv * (config.conv_width + 1)
    counts["scan"] += mixers * 3 * config.mamba_num_heads
    return dict(counts)


def linear_parameters(config: ModelConfig, letter: str) -> int:
    """Number of weights of the linear layers in one block."""
    d = config.d_model
    if letter == "M":
        return d * config.d_in_proj + config.d_mamba * d
    attention = 2 * d * config.head_dim * (config.num_heads + config.num_kv_heads)
    ffn = d * config.d_ffn * (3 if config.activation == "swiglu" else 2)
    return {"*": attention, "-": ffn, "T": attention + ffn}[letter]


def linear_flops(config: ModelConfig) -> dict[str, float]:
    """The "linear" part of `training_flops`, by type of mixer."""
    letters = Counter(config.pattern.replace("T", "*-"))
    mixers = {"Mamba linears": "M", "attention linears": "*", "FFN linears": "-"}
    return {
        kind: 6.0 * letters[letter] * linear_parameters(config, letter)
        for kind, letter in mixers.items()
        if letters[letter]
    }


def training_flops(config: ModelConfig, seq_len: int) -> dict[str, float]:
    """FLOPs of one token's forward and backward pass by FLOP_KINDS, in sequences of seq_len tokens."""
    mixers = config.pattern.count("M")
    chunk = min(config.chunk_size, seq_len)
    scores_and_sums = 3 * (chunk + 1) * (config.num_groups * config.state_size + config.d_mamba)
    states = 12 * config.d_mamba * config.state_size
    heads = config.num_heads * config.head_dim
    return {
        "linear": 6.0 * sum(linear_parameters(config, letter) for letter in config.pattern),
        "head": 6.0 * config.vocab_size * config.d_model,
        "attention": 12.0 * _mean_keys(config, seq_len) * heads * _attentions(config),
        "scan": float(mixers * (scores_and_sums + states)),
        "conv": 6.0 * config.conv_width * config.d_conv * mixers,
    }


def _attentions(config: ModelConfig) -> int:
    return config.pattern.count("*") + config.pattern.count("T")


def _mean_keys(config: ModelConfig, seq_len: int) -> float:
    """The average number of keys that a query attends to: t for the t-th, at most the window."""
    reach = min(config.sliding_window or seq_len, seq_len)
    return (reach * (reach + 1) / 2 + (seq_len - reach) * reach) / seq_len
