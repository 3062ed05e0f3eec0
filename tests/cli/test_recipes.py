"""`fourbits recipes`: every shipped recipe can be listed, shown, stored and read back."""

import json

import pytest

from fourbits.cli.main import main
from fourbits.cli.recipes import operand_words
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
    for words in ("X: nvfp4 1x16 rne", "W: nvfp4 16x16 rne", "dY: nvfp4 1x16 sr", "W: the codes of Fprop"):
        assert words in text
    assert "first 2/62 of the blocks; last 8/62 of the blocks" in text


@pytest.mark.parametrize("name", [name for name in list_recipes() if name != "bf16"])
def test_a_recipe_says_where_it_is_from_and_where_it_deviates(name, capsys):
    text = " ".join(shown(capsys, "show", name).split())
    recipe = get_recipe(name)
    for label, words in (("source", recipe.source), ("taken", recipe.taken), ("deviates", recipe.deviates)):
        assert f"{label}: {words}" in text


def test_an_operands_words_hold_every_option_that_is_not_the_usual_one():
    settings = {"fprop.lhs.amax_policy": "delayed", "fprop.lhs.scale_bound": 256}
    recipe = override(get_recipe("quartet2-46"), settings)
    words = operand_words(recipe.fprop.lhs)
    assert words == "nvfp4 1x16 rne, 4over6-mse, scale_bound 256, amax_policy delayed"
    assert operand_words(recipe.wgrad.rhs) == "nvfp4 1x16 ms-eden, rht 128 (per-call), of Fprop's copy"


def test_a_setting_shows_what_it_would_change(capsys):
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
        (["show", "nvfp5"], "no recipe is called 'nvfp5'. Did you mean 'nvfp4'?"),
        (["show"], "recipes show: needs a recipe. Shipped: bf16"),
        (["list", "nvfp4"], "recipes list: takes no recipe"),
        (["show", "nvfp4", "--fprop.lhs.rouding", "sr"], "unknown key 'rouding'. Did you mean 'rounding'?"),
        (["show", "none.yaml"], "none.yaml: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, text, capsys):
    assert main(["recipes", *argv]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1
