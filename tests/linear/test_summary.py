"""The summary of a conversion: which layers were converted, why, and the quantized share of the model."""

import json

import pytest
from torch import nn

from fourbits.linear.convert import convert
from fourbits.linear.summary import precision_of
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import GemmTable


class Model(nn.Module):
    """64 x 32 embedding, four blocks of 32 x 48 and 48 x 32, a 64 x 32 head."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)) for _ in range(4)]
        )
        self.head = nn.Linear(32, 64, bias=False)


def test_shares_are_counted_by_linear_by_parameter_and_by_flop():
    summary = convert(Model(), "nvfp4")  # of 4 blocks the last is kept
    quantized = 3 * 2 * 32 * 48
    assert summary.share_of_linears == 6 / 9
    assert summary.share_of_flops == quantized / (quantized + 2 * 32 * 48 + 64 * 32)
    assert summary.share_of_parameters == quantized / (4 * 2 * 32 * 48 + 2 * 64 * 32)


def test_every_linear_is_listed_in_model_order_with_shape_precision_and_reason():
    rows = convert(Model(), "nvfp4").rows
    assert [row.name for row in rows] == [*[f"blocks.{i}.{j}" for i in range(4) for j in range(2)], "head"]
    assert rows[0].shape == (48, 32)
    assert [row.precision for row in rows] == ["nvfp4"] * 6 + ["bf16"] * 3
    assert [rows[i].reason for i in (0, 6, 8)] == [
        "recipe nvfp4",
        "last 1 of 4 blocks",
        "output head or embedding",
    ]


def test_the_summary_is_plain_data_for_a_manifest_and_a_few_lines_for_a_reader():
    summary = convert(Model(), "nvfp4")
    data = json.loads(json.dumps(summary.to_dict()))
    assert data["recipe"] == "nvfp4"
    assert data["digest"] == get_recipe("nvfp4").digest
    assert data["linears"][8] == {
        "name": "head",
        "shape": [64, 32],
        "precision": "bf16",
        "reason": "output head or embedding",
    }
    text = str(summary)
    assert "6 linear layers nvfp4" in text
    assert f"{summary.share_of_flops:.1%} of all GEMM weights" in text


def test_bf16_quantizes_nothing_and_says_so():
    summary = convert(Model(), "bf16")
    assert (summary.share_of_linears, summary.share_of_parameters, summary.share_of_flops) == (0, 0, 0)
    assert {row.reason for row in summary.rows} == {"recipe bf16"}


def test_a_model_without_linears_has_an_empty_summary_and_a_warning():
    with pytest.warns(UserWarning, match="convert quantized nothing by recipe nvfp4"):
        summary = convert(nn.Embedding(4, 4), "nvfp4")
    assert summary.rows == ()
    assert summary.share_of_linears == 0


@pytest.mark.parametrize("name", ["nvfp4", "fp8", "mxfp4", "bf16"])
def test_one_word_names_a_table_of_one_format(name):
    assert precision_of(get_recipe(name).table) == name


def test_a_mixed_table_is_named_gemm_by_gemm():
    nvfp4, fp8 = get_recipe("nvfp4").table, get_recipe("fp8").table
    mixed = GemmTable(fprop=nvfp4.fprop, dgrad=fp8.dgrad)
    assert precision_of(mixed) == "nvfp4/fp8/bf16"
