"""lint: each rule finds what it is about, and nothing in what is right."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourbits.cli.main import main
from fourbits.lint.lint import lint
from fourbits.lint.recipe_rules import RECIPE_RULES
from fourbits.lint.run_rules import RUN_RULES
from fourbits.recipe.presets import RECIPES
from fourbits.recipe.recipe import LayerRule
from fourbits.settings import override
from fourbits.train.config import RunConfig, load_config
from fourbits.train.presets import RUN_PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "lint.md").read_text(encoding="utf-8")


def rules(preset: str, gpus: int | None = None, tensor: int = 1, **settings: Any) -> list[str]:
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return [found.rule for found in lint(load_config(preset, RUN_PRESETS, given), gpus, tensor)]


@pytest.mark.parametrize("preset", RUN_PRESETS)
def test_a_preset_with_its_recipe_is_free_of_findings(preset):
    assert lint(RUN_PRESETS[preset]) == []


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("preset", ["tiny", "hybrid-1.2b"])
def test_shipped_recipes_have_the_findings_of_the_page(preset, recipe):
    row = re.search(rf"^\| {recipe} \| (.*) \|$", PAGE, re.M)
    assert rules(preset, recipe=recipe) == (row[1].split(", ") if row else [])


#: per rule: a preset, settings with the mistake, settings near them without it, what the mistake breaks
EXAMPLES: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    "final-blocks": (
        "transformer-1.2b",
        {"recipe__keep_bf16__last_blocks": 1},
        {"recipe__keep_bf16__last_blocks": 2},  # 2 of 20, and 4 of 62 in ablations of the paper
        ["final-blocks"],
    ),
    "head": (
        "transformer-1.2b",
        {"recipe__keep_bf16__names": "[]"},
        {"recipe__keep_bf16__names": "[head]"},
        ["head"],
    ),
    "gradient-rounding": (
        "transformer-1.2b",
        {"recipe__dgrad__lhs__rounding": "rne"},
        {"recipe__dgrad__lhs__rounding": "sr"},
        ["gradient-rounding"],
    ),
    "forward-rounding": (
        "transformer-1.2b",
        {"recipe__fprop__lhs__rounding": "sr"},
        {"recipe__fprop__lhs__rounding": "rne"},
        ["forward-rounding"],
    ),
    "forward-transform": (
        "transformer-1.2b",
        {"recipe__fprop__lhs__rht": 16},
        {"recipe__wgrad__lhs__rht": 32},
        ["forward-transform", "weight-consistency"],  # W has a transform in Fprop alone
    ),
    "weight-consistency": (
        "transformer-1.2b",
        {"recipe__fprop__rhs__block": "[1, 16]", "recipe__dgrad__rhs__block": "[1, 16]"},
        {"recipe__fprop__rhs__block": "[16, 16]", "recipe__dgrad__rhs__block": "[16, 16]"},
        ["weight-consistency"],
    ),
    "claimed-format": (
        "tiny",
        {"recipe__keep_bf16__first_blocks": 3},
        {"recipe__keep_bf16__first_blocks": 2},
        ["claimed-format"],
    ),
    "widths": ("tiny", {"model__d_ffn": 1000}, {"model__d_ffn": 1008}, ["widths"]),
    "rate": ("transformer-1.2b", {"optim__lr": 0.1}, {"optim__lr": 1e-3}, ["rate"]),
    "batch": (
        "transformer-1.2b",
        {"train__gradient_accumulation": 4096},
        {"train__gradient_accumulation": 16},
        ["batch"],
    ),
    "shards": ("hybrid-8b", {"tensor": 8}, {"tensor": 4}, ["shards"]),
    "mamba-groups": ("hybrid-8b", {"tensor": 16}, {"tensor": 2}, ["shards", "mamba-groups"]),
    "data": (
        "tiny",
        {"data__paths": "[more=/nowhere/text, stdlib]"},
        {"data__paths": "[more=/proc/version, stdlib]"},
        ["data"],
    ),
    "checkpoints": (
        "hybrid-12b",
        {"gpus": 16384, "train__checkpoint_interval": 100_000},
        {"gpus": 512},
        ["checkpoints"],
    ),
}


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_rule_finds_its_mistake_and_passes_what_is_right(rule):
    preset, wrong, right, expected = EXAMPLES[rule]
    assert rule in expected
    assert rules(preset, **wrong) == expected
    assert rules(preset, **right) == []


def test_a_rule_for_the_head_is_named_as_one_that_does_nothing():
    recipe = load_config("tiny", RUN_PRESETS, {}).recipe
    quantized = replace(recipe, layers=(LayerRule(names=("head",), table=recipe.table),))
    config = replace(RUN_PRESETS["tiny"], recipe=quantized)
    (found,) = lint(config)
    assert found.rule == "head"
    assert "does nothing" in found.why
    some = replace(recipe, layers=(LayerRule(names=("blocks.4.*",), table=recipe.table),))
    assert lint(replace(config, recipe=some)) == []


def with_rule(preset: str, names: tuple[str, ...], **changes: Any) -> RunConfig:
    """The preset, whose recipe has a rule: the recipe's own table with changes, for layers of these names."""
    config = RUN_PRESETS[preset]
    changed = override(config.recipe, {name.replace("__", "."): value for name, value in changes.items()})
    rule = LayerRule(names=names, table=changed.table)
    return replace(config, recipe=replace(config.recipe, layers=(rule,)))


@pytest.mark.parametrize(
    ("changes", "rule", "what", "remedy"),
    [
        (
            {"wgrad__lhs__rounding": "rne"},
            "gradient-rounding",
            "dY is rounded to nearest in wgrad",
            "Set recipe.layers.0.table.wgrad.lhs.rounding to sr.",
        ),
        (
            {"fprop__lhs__rounding": "sr"},
            "forward-rounding",
            "X or W is rounded stochastically",
            "operands of recipe.layers.0.table.fprop.",
        ),
        (
            {"fprop__lhs__rht": 16, "fprop__rhs__rht": 16},
            "forward-transform",
            "a Hadamard transform of 16",
            "Set recipe.layers.0.table.fprop.lhs.rht and",
        ),
        (
            {"fprop__rhs__block": [1, 16], "dgrad__rhs__block": [1, 16]},
            "weight-consistency",
            "(blocks along each contraction)",
            "recipe.layers.0.table.dgrad.rhs.source to forward.",
        ),
    ],
)
def test_a_mistake_in_a_rule_for_some_layers_is_named_with_its_settings(changes, rule, what, remedy):
    found = {each.rule: each for each in lint(with_rule("tiny", ("blocks.3.*",), **changes))}
    assert what in found[rule].what
    assert remedy in found[rule].remedy


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fprop.rhs.rounding": "sr"}, "(stochastic rounding)"),
        ({"fprop.lhs.rht": 16, "fprop.rhs.rht": 16}, "(a Hadamard transform)"),
        ({"fprop.rhs.block": "[1, 16]", "dgrad.rhs.block": "[1, 16]"}, "(blocks along each contraction)"),
        ({"fprop.rhs.scale_rule": "4over6-mse"}, "(other settings of the operand)"),
    ],
)
def test_an_inconsistent_weight_is_named_with_its_cause(changes, why):
    given = {f"recipe.{name}": value for name, value in changes.items()}
    found = {each.rule: each for each in lint(load_config("tiny", RUN_PRESETS, given))}
    assert found["weight-consistency"].what.endswith(why)


def test_last_blocks_that_keep_bf16_by_name_count():
    names = ("head", "blocks.18.*", "blocks.19.*")
    keep = {"recipe__keep_bf16__last_blocks": 0}
    assert rules("transformer-1.2b", recipe__keep_bf16__names=list(names), **keep) == []
    assert rules("transformer-1.2b", recipe__keep_bf16__names=list(names[:2]), **keep) == ["final-blocks"]


def test_a_recipe_called_fp4_whose_layers_are_fp8_but_for_some_is_named():
    config = RUN_PRESETS["tiny"]
    rule = LayerRule(names=("blocks.3.*",), table=config.recipe.table)
    recipe = replace(RECIPES["fp8"], keep_bf16=config.recipe.keep_bf16, layers=(rule,))
    (found,) = lint(replace(config, recipe=replace(recipe, name="mine-fp4")))
    assert found.rule == "claimed-format"
    assert re.match(r"[1-4]?\d% of the blocks' weights are quantized to 4 bits$", found.what)
    assert lint(replace(config, recipe=replace(recipe, name="mine"))) == []


def test_fp4_gradients_of_fp8_weights_are_inconsistent():
    given = {f"recipe.fprop.{side}.format": "mxfp8" for side in ("lhs", "rhs")}
    found = lint(load_config("tiny", RUN_PRESETS, given | {"recipe.fprop.rhs.block": "[1, 32]"}))
    assert [each.rule for each in found] == ["weight-consistency"]
    assert "nvfp4 after mxfp8" in found[0].what


def test_a_late_switch_stands_for_blocks_in_bf16():
    settings = {"recipe__keep_bf16__last_blocks": 0}
    assert rules("transformer-1.2b", **settings, recipe__schedule="late-forward") == []
    assert rules("transformer-1.2b", **settings, recipe__schedule="gradual-start") == ["final-blocks"]


def test_a_recipe_called_fp4_without_4_bits_is_named():
    assert rules("tiny", recipe="fp8", recipe__name="my-fp4") == ["claimed-format"]
    assert rules("tiny", recipe="fp8") == []


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [(2, []), (4, []), (8, ["shards"]), (16, ["shards", "mamba-groups"]), (3, ["shards", "mamba-groups"])],
)
def test_shards_must_not_cut_blocks_or_groups(tensor, expected):
    assert rules("hybrid-8b", tensor=tensor) == expected


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [("absent.json", ["data"]), ("gpt2", []), ("org/name", []), (str(Path(__file__)), []), (None, [])],
)
def test_a_tokenizer_file_that_is_missing_is_found_and_a_hub_name_is_none(tokenizer, expected):
    assert rules("tiny", data__tokenizer=tokenizer) == expected


@pytest.mark.parametrize(
    ("gpus", "settings", "expected"),
    [
        (512, {}, []),
        (16384, {"train__checkpoint_interval": 100_000}, ["checkpoints"]),
        (16384, {"train__checkpoint_interval": None}, ["checkpoints"]),
        (16384, {"train__checkpoint_interval": None, "train__save_every_minutes": 10}, []),
    ],
)
def test_checkpoints_must_not_be_rarer_than_failures(gpus, settings, expected):
    assert rules("hybrid-12b", gpus=gpus, **settings) == expected


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A prepared folder of forty short texts."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"Text number {number} of forty.\n" * 5)
    out = tmp_path_factory.mktemp("out") / "prepared"
    assert main(["data", "prepare", f"letters={folder}", "--out", str(out), "--vocab-size", "384"]) == 0
    return out


def test_a_source_that_is_read_many_times_is_named(prepared):
    given: Any = {"data__paths": str(prepared), "train__seq_len": 16, "train__micro_batch_size": 64}
    assert rules("tiny", **given) == ["blend"]
    assert rules("tiny", **given, train__steps=1) == []


def test_the_page_has_every_rule_and_no_other():
    names = set(re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.M))
    text = "".join(Path(module).read_text() for module in _files())
    assert names == set(re.findall(r'^ +"([a-z]+(?:-[a-z]+)*)",$', text, re.M)) | {"rate", "batch"}
    assert len(RECIPE_RULES) + len(RUN_RULES) <= len(names)
    assert names == {*EXAMPLES, "blend"}  # the examples of which need a prepared folder


def _files() -> list[str]:
    folder = Path(__file__).parents[2] / "src" / "fourbits" / "lint"
    return [str(folder / "recipe_rules.py"), str(folder / "run_rules.py")]


def test_the_command_prints_reasons_and_remedies_and_its_code_tells(capsys):
    assert main(["lint", "tiny"]) == 0
    assert capsys.readouterr().out == "tiny with nvfp4: no findings\n"
    assert main(["lint", "tiny", "--recipe", "nvfp4-naive"]) == 1
    out = capsys.readouterr().out
    assert "gradient-rounding: dY is rounded to nearest in dgrad and wgrad\n" in out
    assert "  Set recipe.dgrad.lhs.rounding and recipe.wgrad.lhs.rounding to sr." in out
    assert out.endswith("tiny with nvfp4-naive: 3 findings\n")
    assert main(["lint", "tiny", "--recipe", "quartet2", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert set(found) == {"rule", "what", "why", "remedy"}


#: settings that 16 ranks can share, where hybrid-8b has 4 KV heads, 8 groups and 128 Mamba heads
KV, GROUPS, HEADS = {"num_kv_heads": 16}, {"num_groups": 16}, {"mamba_num_heads": 256}


@pytest.mark.parametrize(
    ("ranks", "settings", "whole", "remedy"),
    [
        # the rows dt of in_proj, one per head: 8 of each of 16 ranks would be half a block
        (16, KV | GROUPS, "whole blocks of 16 of in_proj's rows dt", "mamba_num_heads a multiple of 256"),
        (16, KV | GROUPS | HEADS, None, ""),
        (16, KV | HEADS, "groups of Mamba heads", "num_groups a multiple of 16"),
        (8, {}, "whole heads of K and V", "num_kv_heads a multiple of 8"),
        (8, KV, None, ""),
    ],
)
def test_lint_and_the_trainer_refuse_the_same_ranks_for_the_same_reason(ranks, settings, whole, remedy):
    given = {f"model.{name}": value for name, value in settings.items()}
    found = lint(load_config("hybrid-8b", RUN_PRESETS, given), tensor=ranks)
    given |= {"parallel.tensor": ranks}
    if whole is None:
        assert found == []
        assert load_config("hybrid-8b", RUN_PRESETS, given).parallel.tensor == ranks
        return
    assert whole in found[0].what
    assert remedy in found[0].remedy
    with pytest.raises(ValueError, match=f"so that each rank has .*{whole}") as error:
        load_config("hybrid-8b", RUN_PRESETS, given)
    fitting = re.search(r"Set parallel.tensor to (\d+)", found[0].remedy)
    assert fitting is not None
    assert str(error.value).endswith(f"Set parallel.tensor to {fitting[1]}.")
    assert rules("hybrid-8b", tensor=int(fitting[1]), **{f"model__{n}": v for n, v in settings.items()}) == []
