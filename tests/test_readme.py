"""The README and the pages keep their word: links, commands, examples, and the size of the core."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fourbits.cli.commands import COMMANDS, load
from fourbits.cli.parser import parse
from fourbits.cli.recipes import weight_warning
from fourbits.recipe.presets import get_recipe, list_recipes

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str, text: str = README) -> list[str]:
    """The contents of the fenced blocks of one language."""
    return [part.split("```")[0] for part in text.split(f"```{language}\n")[1:]]


def commands(text: str) -> list[list[str]]:
    """The `fourbits` commands of the shell blocks, without the program's name."""
    joined = [block.replace("\\\n", " ") for block in blocks("sh", text)]  # a line may end with a backslash
    lines = [shlex.split(line, comments=True) for block in joined for line in block.splitlines()]
    return [words[1:] for words in lines if words and words[0] in ("fourbits", ".venv/bin/fourbits")]


def test_the_readme_fits_in_150_lines():
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_to_a_file_leads_to_one(page):
    prose = re.sub(r"`[^`]*`", "", page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", prose)
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_of_a_page_is_one_that_fourbits_parses(page):
    for name, *arguments in commands(page.read_text(encoding="utf-8")):
        assert name in COMMANDS
        parse(name, load(name), arguments)


def test_the_readme_has_commands_to_parse():
    assert {name for name, *_ in commands(README)} >= {"demo", "doctor", "train", "compare", "data"}


def test_the_readme_names_every_shipped_recipe():
    assert [name for name in list_recipes() if f"`{name}`" not in README] == []


def test_the_conversion_of_the_readme_trains_a_transformers_model(capsys):
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))
    tokens = torch.arange(32).reshape(1, 32) * 5 % 64
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = {"input_ids": tokens, "labels": tokens}
    before = model(**batch).loss.item()
    exec(blocks("python")[0], {"model": model, "batches": [batch] * 8, "optimizer": optimizer})
    assert "nvfp4" in capsys.readouterr().out
    assert {type(m).__name__ for m in model.modules() if isinstance(m, torch.nn.Linear)} == {"Linear"}
    assert model(**batch).loss.item() < before


def test_the_readme_imports_names_that_exist():
    imports = [line for block in blocks("python") for line in block.splitlines() if "import " in line]
    assert len(imports) == 2
    exec("\n".join(imports), {})


def test_the_recipe_of_the_readme_keeps_one_w_in_both_directions(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(blocks("yaml")[0])
    recipe = get_recipe(path)
    assert recipe.digest != get_recipe("nvfp4").digest
    assert weight_warning(recipe.table) is None
