"""Counts against derivations written out by hand, and against the model itself; see also test_presets.py."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fourbits.model.counts import count_parameters, linear_flops, linear_parameters, training_flops
from fourbits.model.lm import LanguageModel
from model.shapes import small_config


@pytest.mark.parametrize("pattern", ["M-*-", "TT", "M", "*"])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": True}, {"activation": "swiglu"}, {"qk_norm": True}], ids=str
)
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
    # Forward, per token, a multiply-add counts as two: it attends to 2.5 tokens of its chunk on average.
    scores, sums = 2 * 2.5 * 8, 2 * 2.5 * 4 * 2
    states = 2 * (2 * 4 * 8) + 2 * (2 * 4 * 8)
    assert training_flops(config, 64)["scan"] == 3 * (scores + sums + states)
    assert training_flops(config, 2)["scan"] == 3 * (2 * 1.5 * 8 + 2 * 1.5 * 8 + states)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_flops_of_attention_are_those_of_the_visible_pairs(window):
    config = small_config("*T", sliding_window=window)
    pairs = sum(min(t, window or 8) for t in range(1, 9)) / 8  # mean number of keys of a query of 8 tokens
    assert training_flops(config, 8)["attention"] == 2 * 3 * (2 * 2 * pairs * 4 * 16)


def test_a_transformer_block_is_an_attention_and_an_ffn_block():
    config = small_config("T")
    assert linear_parameters(config, "T") == linear_parameters(config, "*") + linear_parameters(config, "-")


def test_linears_of_all_mixers_make_up_the_linear_flops():
    config = small_config("M-*-TT")
    flops = linear_flops(config)
    assert sum(flops.values()) == training_flops(config, 8)["linear"]
    assert flops["FFN linears"] == 4 * 6 * linear_parameters(config, "-")
    assert set(linear_flops(small_config("T"))) == {"attention linears", "FFN linears"}
