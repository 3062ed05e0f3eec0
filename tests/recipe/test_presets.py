"""Shipped recipes are what docs/nvfp4.md, section 14, says: read from its table, operand by operand."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fourbits.linear.convert import convert
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel
from fourbits.quant.operand import OperandSpec
from fourbits.recipe.presets import get_recipe, list_recipes
from fourbits.recipe.recipe import GemmTable, KeepBF16, Recipe
from fourbits.settings import build

DOC = (Path(__file__).parents[2] / "docs" / "nvfp4.md").read_text(encoding="utf-8")
ROLES = ("fprop.lhs", "fprop.rhs", "dgrad.lhs", "dgrad.rhs", "wgrad.lhs", "wgrad.rhs")
EDEN = "nvfp4 1x16 ms-eden, rht 128, per-call signs"
PAPER = KeepBF16(first_blocks="2/62", last_blocks="8/62")
BLOCKS = {
    "none": KeepBF16(),
    "paper share": PAPER,
    "first round(L/62), last max(1, round(2L/62))": KeepBF16(first_blocks="1/62", last_blocks="2/62"),
    "last max(1, round(0.15 L))": KeepBF16(last_blocks="15/100"),
}


def rows(header: str) -> dict[str, list[str]]:
    """Cells of the table with this header, by the first cell of each row."""
    lines = DOC[DOC.index(header) :].split("\n\n")[0].splitlines()[2:]
    cells = [
        [re.sub(r" \[N \d+\]", "", cell.strip()) for cell in line.strip("|").split("|")] for line in lines
    ]
    return {row[0]: row[1:] for row in cells}


OPERANDS = rows("| preset | X fprop |")


def cell_text(preset: str, column: int) -> str:
    """A cell with what it refers to put in its place."""
    text = OPERANDS[preset][column]
    if text.startswith("nvfp4 + "):
        return f"{cell_text('nvfp4', column)}, {text.removeprefix('nvfp4 + ')}"
    if text == "as nvfp4":
        return cell_text("nvfp4", column)
    if text == "= fprop":
        return cell_text(preset, 1)
    return text.replace("EDEN", EDEN)


def spec_of(text: str, is_weight: bool) -> OperandSpec:
    """The operand that a cell describes."""
    first, *options = text.split(", ")
    name, *words = first.split()
    if name == "bf16":
        return OperandSpec(format="bf16")
    found: dict[str, Any] = {"format": name, "source": "bf16" if is_weight else "as_is", "rounding": words[1]}
    found["block"] = [int(size) for size in words[0].split("x")]
    found["scale_rule"] = "".join(words[2:]) or "max"
    for option in options:
        key, _, value = option.partition(" ")
        if key == "rht":
            found["rht"] = int(value)
        elif key == "interval":
            found |= {"amax_policy": key, "amax_interval": int(value)}
        elif key == "error_feedback":
            found[key] = int(value)
        elif key == "correction":
            found[key] = value
        elif value == "signs":
            found["rht_signs"] = key
        else:
            found["source" if key == "source" else "scale_rule"] = value or key
    return build(OperandSpec, found)


def written_out(spec: OperandSpec) -> OperandSpec:
    """With its defaults filled in, so that two ways to write one operand are equal."""
    if not spec.block_format.quantized:
        return spec
    return replace(spec, block=spec.block_size or (0, 0), rht_signs=spec.signs if spec.rht else "")


def test_the_document_lists_the_shipped_recipes():
    assert set(OPERANDS) == set(list_recipes())
    origins = rows("| preset | source | taken")
    assert set(origins) == {name for name in list_recipes() if name != "bf16"}
    for name, cells in origins.items():
        recipe = get_recipe(name)
        assert cells == [recipe.source, recipe.taken, recipe.deviates]


@pytest.mark.parametrize("preset", list_recipes())
def test_every_operand_is_as_documented(preset):
    table = get_recipe(preset).table
    for column, role in enumerate(ROLES):
        expected = spec_of(cell_text(preset, column), is_weight=role in ("fprop.rhs", "dgrad.rhs"))
        assert written_out(table.operand(role)) == written_out(expected), role


@pytest.mark.parametrize("preset", [name for name in list_recipes() if name != "bf16"])
def test_the_blocks_in_bf16_are_as_documented(preset):
    expected, keep = BLOCKS[OPERANDS[preset][6]], get_recipe(preset).keep_bf16
    for blocks in range(1, 63):
        assert keep.count_first(blocks) == expected.count_first(blocks)
        assert keep.count_last(blocks) == expected.count_last(blocks)


@pytest.mark.parametrize("preset", list_recipes())
def test_dgrad_shares_the_codes_of_w_where_the_document_says_so(preset):
    assert get_recipe(preset).table.shares_weight == (OPERANDS[preset][3] == "= fprop")


def hybrid() -> nn.Module:
    """Eight blocks, the last of them attention, the one before a Mamba block."""
    config = ModelConfig(
        vocab_size=64,
        d_model=32,
        pattern="M-*TM-M*",
        d_ffn=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        state_size=16,
        num_groups=1,
        mamba_head_dim=16,
        mamba_num_heads=4,
    )
    return LanguageModel(config)


def test_nemotron3_super_treats_attention_and_mamba_output_projections_separately():
    summary = convert(hybrid(), "nemotron3-super")
    found = {row.name: (row.precision, row.reason) for row in summary.rows}
    for name, (precision, reason) in found.items():
        kind = name.split(".")[-1]
        if name == "head":
            assert precision == "bf16"
        elif kind in ("q_proj", "k_proj", "v_proj", "o_proj"):
            assert (precision, reason) == ("bf16", "attention projection"), name
        elif name.startswith("blocks.7"):
            assert (precision, reason) == ("bf16", "last 1 of 8 blocks"), name
        elif kind == "out_proj":
            assert (precision, reason) == ("mxfp8", "Mamba output projection"), name
        else:
            assert precision == "nvfp4", name
    assert found["blocks.0.mixer.out_proj"][0] == "mxfp8"
    assert found["blocks.3.attention.q_proj"][0] == "bf16"


@pytest.mark.parametrize("role", ["fprop.lhs", "fprop.rhs", "dgrad.lhs", "wgrad.lhs"])
def test_only_operands_that_fprop_has_too_can_be_quantized_from_its_copy(role):
    gemm, side = role.split(".")
    with pytest.raises(
        ValueError, match=rf"{role}\.source: forward .* only dgrad\.rhs \(W\) and wgrad\.rhs \(X\)"
    ):
        build(GemmTable, {gemm: {side: {"source": "forward"}}})


@pytest.mark.parametrize(("gemm", "of_fprop"), [("dgrad", "fprop.rhs"), ("wgrad", "fprop.lhs")])
def test_a_transformed_forward_copy_cannot_be_quantized_again(gemm, of_fprop):
    rotated = {"lhs": {"rht": 16}, "rhs": {"rht": 16}}
    tree = {"name": "rotated", "fprop": rotated, gemm: {"rhs": {"source": "forward"}}}
    with pytest.raises(ValueError, match=rf"{gemm}\.rhs\.source: forward .* set {of_fprop}\.rht to 0"):
        build(Recipe, tree)
