"""Counts against derivations written out by hand, and against the model itself."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fourbits.model.counts import count_parameters, linear_parameters, training_flops
from fourbits.model.lm import LanguageModel
from fourbits.model.presets import MODEL_PRESETS
from model.shapes import small_config

DERIVED = {
    # Mamba-2: z 256 | x 256 | B 32 | C 32 | dt 16 = 592 from 128, and 256 to 128; 288 + 32 = 320 channels of
    # 4 taps and a bias; A, D, dt for 16 heads; a gain for 256; a norm of 128.
    "tiny": 2 * 2048 * 128  # embedding and head
    + 3 * (128 * 592 + 256 * 128 + 320 * 5 + 3 * 16 + 256 + 128)  # M
    + 4 * (2 * 128 * 384 + 128)  # FFN
    + 1 * (128 * 128 + 2 * 128 * 64 + 128 * 128 + 128)  # attention: q, k and v, o
    + 128,  # final norm
    "30m": 2 * 32000 * 640 + 6 * (4 * 640 * 640 + 3 * 640 * 1792 + 2 * 640) + 640,
}
TOTALS = {"tiny": 1_299_152, "30m": 71_442_560}


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_a_preset_has_the_derived_number_of_parameters_to_the_digit(name):
    config = MODEL_PRESETS[name]
    with torch.device("meta"):
        model = LanguageModel(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert built == DERIVED[name] == TOTALS[name] == sum(count_parameters(config).values())


def test_the_30m_llama_has_its_published_size():
    counts = count_parameters(MODEL_PRESETS["30m"])
    assert sum(counts.values()) - counts["embedding"] - counts["head"] == 30_482_560


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_every_linear_of_a_preset_divides_into_blocks_of_16(name):
    with torch.device("meta"):
        model = LanguageModel(MODEL_PRESETS[name])
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert module.in_features % 16 == module.out_features % 16 == 0, path


@pytest.mark.parametrize("pattern", ["M-*-", "TT", "M", "*"])
@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"activation": "swiglu"}], ids=str)
def test_each_kind_of_parameter_is_counted_where_it_belongs(pattern, changes):
    config = small_config(pattern, **changes)
    with torch.device("meta"):
        model = LanguageModel(config)
    counts = dict.fromkeys(count_parameters(config), 0)
    for name, parameter in model.named_parameters():
        kind = {"embed": "embedding", "head": "head"}.get(name.split(".")[0], "linear")
        kind = "conv" if "conv" in name else "norm" if "norm" in name else kind
        kind = "scan" if name.rsplit(".", 1)[-1] in ("A_log", "D", "dt_bias") else kind
        counts[kind] += parameter.numel()
    assert counts == count_parameters(config)


def test_linear_flops_are_those_that_pytorch_counts():
    config = small_config("M-*-T")
    with torch.device("meta"):
        model = LanguageModel(config)
        tokens = torch.zeros(2, 24, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    flops = training_flops(config, 24)
    assert products == 48 * (flops["linear"] + flops["head"])


def test_flops_of_the_scan_are_those_of_its_products_without_the_masked_half():
    config = small_config("M", mamba_num_heads=2, mamba_head_dim=4, num_groups=1, state_size=8, chunk_size=4)
    # Forward, per token, a multiply-add being two: it meets 2.5 tokens of its chunk on average.
    scores, sums = 2 * 2.5 * 8, 2 * 2.5 * 4 * 2
    states = 2 * (2 * 4 * 8) + 2 * (2 * 4 * 8)
    assert training_flops(config, 64)["scan"] == 3 * (scores + sums + states)
    assert training_flops(config, 2)["scan"] == 3 * (2 * 1.5 * 8 + 2 * 1.5 * 8 + states)


def test_flops_of_attention_are_those_of_the_causal_half():
    config = small_config("*T")
    pairs = sum(range(1, 9)) / 8  # keys that a query of 8 tokens meets
    assert training_flops(config, 8)["attention"] == 2 * 3 * (2 * 2 * pairs * 4 * 16)


def test_a_transformer_block_is_an_attention_and_an_ffn_block():
    config = small_config("T")
    assert linear_parameters(config, "T") == linear_parameters(config, "*") + linear_parameters(config, "-")
