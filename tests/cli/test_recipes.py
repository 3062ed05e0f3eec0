"""`fourbits recipes`: every shipped recipe can be listed, shown, written and read back."""

import json

import pytest

from fourbits.cli.main import main
from fourbits.cli.recipes import operand_text
from fourbits.recipe.presets import get_recipe, list_recipes
from fourbits.settings import override


def shown(capsys, *argv: str) -> str:
    assert main(["recipes", *argv]) == 0
    return capsys.readouterr().out


def test_the_list_names_every_shipped_recipe_and_its_source(capsys):
    listed = json.loads(shown(capsys, "list", "--json"))
    assert [entry["name"] for entry in listed] == list(list_recipes())
    assert all(entry["taken"] for entry in listed)
    assert all(entry["source"] and entry["deviates"] for entry in listed if entry["name"] != "bf16")
    assert all(name in shown(capsys, "list") for name in list_recipes())


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_printed_as_yaml_is_a_file_that_gives_the_same_recipe(name, capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(shown(capsys, "show", name, "--yaml"))
    assert get_recipe(path) == get_recipe(name)


def test_the_table_shows_both_operands_of_every_gemm(capsys):
    text = " ".join(shown(capsys, "show", "nvfp4").split())
    assert "Fprop Y = X W^T" in text
    for words in (
        "X: nvfp4 1x16 rne",
        "W: nvfp4 16x16 rne",
        "dY: nvfp4 1x16 sr",
        "W: reused from Fprop",
    ):
        assert words in text
    assert "first 2/62 of the blocks; last 8/62 of the blocks" in text


@pytest.mark.parametrize("name", [name for name in list_recipes() if name != "bf16"])
def test_a_shown_recipe_states_its_source_what_it_follows_and_how_it_differs(name, capsys):
    text = " ".join(shown(capsys, "show", name).split())
    recipe = get_recipe(name)
    for label, words in (("source", recipe.source), ("follows", recipe.taken), ("differs", recipe.deviates)):
        assert f"{label}: {words}" in text


def test_the_text_of_an_operand_has_every_option_that_is_not_at_its_default():
    settings = {"fprop.lhs.amax_policy": "delayed", "fprop.lhs.scale_bound": 256}
    recipe = override(get_recipe("quartet2-46"), settings)
    text = operand_text(recipe.fprop.lhs)
    assert text == "nvfp4 1x16 rne, 4over6-mse, scale_bound 256, amax_policy delayed"
    assert operand_text(recipe.wgrad.rhs) == "nvfp4 1x16 ms-eden, rht 128 (per-call), re-quantized from Fprop"


ROWS = ["--fprop.rhs.block", "[1, 16]"]


@pytest.mark.parametrize(
    ("argv", "warns"),
    [
        (["nvfp4"], None),
        (["nvfp4", "--keep_bf16.last_blocks", "1"], None),
        (
            ["nvfp4", *ROWS],
            "warning: W is nvfp4 1x16 rne in Fprop and nvfp4 16x16 rne in Dgrad, so gradients",
        ),
        (
            ["nvfp4", *ROWS, "--dgrad.rhs.block", "[1, 16]"],
            "warning: Fprop and Dgrad quantize W (nvfp4 1x16 rne) along different axes, so gradients",
        ),
        (["nvfp4-fwd"], "warning: W is nvfp4 16x16 rne in Fprop and bf16 in Dgrad"),
        (["bf16"], None),
        (["bf16", "--fprop.rhs.format", "fp32"], "warning: W is fp32 in Fprop and bf16 in Dgrad"),
        (["quartet2"], None),  # Dgrad's W is computed from the values of Fprop's
        (
            ["nemotron3-super"],
            "warning: *.mixer.out_proj *.mamba.out_proj: Fprop and Dgrad quantize W (mxfp8",
        ),
    ],
)
def test_show_warns_where_dgrad_multiplies_by_another_w_than_fprop(argv, warns, capsys):
    text = " ".join(shown(capsys, "show", *argv).split())
    assert ("warning: " in text) == (warns is not None)
    assert warns is None or warns in text


def test_a_setting_previews_its_effect(capsys):
    changed = json.loads(shown(capsys, "show", "nvfp4", "--json", "--dgrad.lhs.rounding", "rne"))
    assert changed["dgrad"]["lhs"]["rounding"] == "rne"
    assert changed["digest"] != get_recipe("nvfp4").digest
    assert (changed["source"], changed["taken"]) == ("nvfp4, changed", "")


def test_a_setting_that_changes_no_bit_leaves_the_credits(capsys):
    same = json.loads(shown(capsys, "show", "nvfp4", "--json", "--saved_inputs", "packed"))
    assert (same["source"], same["taken"]) == (get_recipe("nvfp4").source, get_recipe("nvfp4").taken)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["show", "nvfp5"], "fourbits recipes: no recipe is called 'nvfp5'. Did you mean 'nvfp4'?"),
        (["show"], "fourbits recipes: show needs a recipe. Use one of bf16"),
        (["list", "nvfp4"], "fourbits recipes: list takes no recipe"),
        (["show", "nvfp4", "--fprop.lhs.rouding", "sr"], "unknown key 'rouding'. Did you mean 'rounding'?"),
        (["show", "none.yaml"], "'none.yaml' must be a file, and there is none. Pass its path"),
    ],
)
def test_incorrect_usage_is_one_line_and_exit_code_2(argv, text, capsys):
    assert main(["recipes", *argv]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1
