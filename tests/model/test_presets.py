"""Every preset against a derivation written out here, to the digit, and against the model itself."""

from functools import cache

import pytest
import torch

from fourbits.model.counts import count_parameters
from fourbits.model.lm import LanguageModel
from fourbits.model.presets import MODEL_PRESETS

V32, V131 = 32_000, 131_072


def mamba(d, heads, head_dim, groups, state=128):
    """A norm; z, x, B, C and dt from d; 4 taps and a bias for x, B, C; A, D, dt_bias; a gain; back to d."""
    inner, b_and_c = heads * head_dim, 2 * groups * state
    projected = 2 * inner + b_and_c + heads
    return d + d * projected + 5 * (inner + b_and_c) + 3 * heads + inner + inner * d


def ffn(d, inner):
    return d + 2 * d * inner


def attention(d, heads, kv_heads, head_dim=128):
    """A norm; q and o of all heads; k and v of the shared ones."""
    return d + 2 * d * heads * head_dim + 2 * d * kv_heads * head_dim


def ends(vocabulary, d):
    """Embedding, head, and the norm before the head."""
    return 2 * vocabulary * d + d


def llama(blocks, d, inner):
    """Per block four square projections, three of the FFN, two norms."""
    return ends(V32, d) + blocks * (4 * d * d + 3 * d * inner + 2 * d)


DERIVED = {
    "tiny": ends(2048, 128) + 3 * mamba(128, 16, 16, 1, 32) + 4 * ffn(128, 384) + attention(128, 4, 2, 32),
    "30m": llama(6, 640, 1792),
    "50m": llama(7, 768, 2048),
    "100m": llama(8, 1024, 2816),
    "200m": llama(10, 1280, 3584),
    "400m": llama(12, 1664, 4608),
    "1b": llama(20, 2048, 5632),
    "hybrid-30m": ends(V32, 512) + 8 * mamba(512, 16, 64, 1) + 8 * ffn(512, 2048) + 2 * attention(512, 4, 2),
    "hybrid-50m": ends(V32, 512)
    + 12 * mamba(512, 16, 64, 1)
    + 12 * ffn(512, 2048)
    + 3 * attention(512, 4, 2),
    "hybrid-100m": ends(V32, 1024)
    + 6 * mamba(1024, 32, 64, 2)
    + 6 * ffn(1024, 4096)
    + 2 * attention(1024, 8, 2),
    "hybrid-200m": ends(V32, 1024)
    + 13 * mamba(1024, 32, 64, 2)
    + 13 * ffn(1024, 4096)
    + 3 * attention(1024, 8, 2),
    "hybrid-400m": ends(V32, 1536)
    + 11 * mamba(1536, 48, 64, 3)
    + 11 * ffn(1536, 6144)
    + 2 * attention(1536, 12, 4),
    "hybrid-1b": ends(V32, 2048)
    + 16 * mamba(2048, 64, 64, 4)
    + 16 * ffn(2048, 8192)
    + 3 * attention(2048, 16, 4),
    "hybrid-1.2b": ends(V131, 2048)
    + 12 * mamba(2048, 64, 64, 4)
    + 12 * ffn(2048, 8192)
    + 3 * attention(2048, 16, 4),
    "transformer-1.2b": ends(V131, 2048) + 20 * (attention(2048, 16, 8) + ffn(2048, 6144)),
    "hybrid-8b": ends(V131, 4096)
    + 24 * mamba(4096, 128, 64, 8)
    + 24 * ffn(4096, 21504)
    + 4 * attention(4096, 32, 4),
    "hybrid-12b": ends(V131, 5120)
    + 28 * mamba(5120, 160, 64, 8)
    + 28 * ffn(5120, 20480)
    + 6 * attention(5120, 40, 8),
    "nemotron-nano-12b-v2": ends(V131, 5120)
    + 28 * mamba(5120, 128, 80, 8)
    + 28 * ffn(5120, 20480)
    + 6 * attention(5120, 40, 8),
}
TOTALS = {
    "tiny": 1_299_152,
    "30m": 71_442_560,
    "50m": 98_708_736,
    "100m": 168_313_856,
    "200m": 285_108_480,
    "400m": 515_482_240,
    "1b": 1_158_760_448,
    "hybrid-30m": 64_884_608,
    "hybrid-50m": 80_942_656,
    "hybrid-100m": 162_306_624,
    "hybrid-200m": 271_707_872,
    "hybrid-400m": 488_290_608,
    "hybrid-1b": 1_138_256_896,
    "hybrid-1.2b": 1_300_125_952,
    "transformer-1.2b": 1_291_929_600,
    "hybrid-8b": 8_084_075_520,
    "hybrid-12b": 12_314_591_360,
    "nemotron-nano-12b-v2": 12_310_001_152,
}
# Published: N without embedding and head (IST-DASLab/Quartet-II).
PUBLISHED = {"30m": 30_482_560, "50m": 49_556_736, "100m": 102_777_856, "200m": 203_188_480}


@cache
def built(name):
    with torch.device("meta"):
        return LanguageModel(MODEL_PRESETS[name])


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_a_preset_has_the_derived_number_of_parameters_to_the_digit(name):
    parameters = sum(parameter.numel() for parameter in built(name).parameters())
    assert parameters == DERIVED[name] == TOTALS[name] == sum(count_parameters(MODEL_PRESETS[name]).values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_llamas_have_their_published_sizes(name):
    counts = count_parameters(MODEL_PRESETS[name])
    assert sum(counts.values()) - counts["embedding"] - counts["head"] == PUBLISHED[name]


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_every_linear_of_a_preset_divides_into_blocks_of_16(name):
    for path, module in built(name).named_modules():
        if isinstance(module, torch.nn.Linear):
            assert module.in_features % 16 == module.out_features % 16 == 0, path


@pytest.mark.parametrize(
    ("name", "mamba_blocks", "attention_blocks", "in_proj"),
    [
        ("hybrid-12b", 28, 6, 2 * 10240 + 2 * 8 * 128 + 160),
        ("nemotron-nano-12b-v2", 28, 6, 22656),
        ("hybrid-8b", 24, 4, 2 * 8192 + 2 * 8 * 128 + 128),
    ],
)
def test_the_papers_hybrids_have_its_blocks_and_projections(name, mamba_blocks, attention_blocks, in_proj):
    config = MODEL_PRESETS[name]
    counts = {letter: config.pattern.count(letter) for letter in "M-*T"}
    assert counts == {"M": mamba_blocks, "-": mamba_blocks, "*": attention_blocks, "T": 0}
    assert config.d_in_proj == in_proj
    assert config.d_mamba == 2 * config.d_model
    assert config.num_heads * config.head_dim == config.d_model


@pytest.mark.parametrize("name", ["hybrid-12b", "hybrid-8b", "hybrid-1.2b", "hybrid-1b", "hybrid-50m"])
def test_attention_blocks_are_evenly_spaced(name):
    """Between two of them, before the first and after the last lie equally many Mamba blocks, or one less."""
    between = [part.count("M") for part in MODEL_PRESETS[name].pattern.split("*")]
    inner = between[:-1]
    assert max(inner) - min(inner) <= 1
    assert between[-1] <= max(inner)
