"""Run settings: presets by name, files, overrides, and errors that name the key."""

from dataclasses import replace
from pathlib import Path

import pytest

from fourbits.model.presets import MODEL_PRESETS
from fourbits.recipe.presets import get_recipe
from fourbits.settings import build, dump_yaml, parse_yaml, to_dict
from fourbits.train.config import RunConfig, TrainConfig, config_from_mapping, differences, load_config
from fourbits.train.presets import RUN_PRESETS


def load(overrides=None, source="tiny"):
    return load_config(source, RUN_PRESETS, overrides)


@pytest.mark.parametrize("name", RUN_PRESETS)
def test_a_preset_survives_yaml(name):
    text = dump_yaml(to_dict(RUN_PRESETS[name]))
    assert build(RunConfig, parse_yaml(text, "text")) == RUN_PRESETS[name]
    assert load(source=name) == RUN_PRESETS[name]


def test_a_file_names_model_and_recipe_or_spells_them_out(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: tiny\nrecipe: {base: mxfp4, keep_bf16: {last_blocks: 3}}\ntrain: {steps: 5}\n")
    config = load(source=path)
    assert config.model == MODEL_PRESETS["tiny"]
    assert config.recipe.keep_bf16.last_blocks == 3
    assert config.recipe.wgrad == get_recipe("mxfp4").wgrad


@pytest.mark.parametrize(
    ("overrides", "read"),
    [
        ({"optim.lr": "3e-3"}, lambda c: c.optim.lr == 3e-3),
        ({"train.steps": "50"}, lambda c: (c.train.steps, c.train.tokens) == (50, None)),
        ({"train.tokens": "1e6"}, lambda c: (c.train.steps, c.train.tokens) == (None, 1_000_000)),
        ({"optim.masters": "bf16-sr"}, lambda c: c.optim.masters == "bf16-sr"),
        ({"model.residual_dtype": "fp32"}, lambda c: c.model.residual_dtype == "fp32"),
        ({"recipe": "mxfp4"}, lambda c: c.recipe == get_recipe("mxfp4")),
        ({"recipe.wgrad.lhs.rht": "32"}, lambda c: c.recipe.wgrad.rhs.transform == (32, "fixed:0")),
        ({"recipe.wgrad.rhs.rht_signs": "per-call"}, lambda c: c.recipe.wgrad.lhs.signs == "per-call"),
        (
            {"recipe.fprop.rhs.rht": "16"},
            lambda c: (c.recipe.fprop.lhs.rht, c.recipe.wgrad.lhs.rht) == (16, 16),
        ),
        ({"model.d_ffn": "256"}, lambda c: c.model.d_ffn == 256),
        (
            {"recipe.keep_bf16.last_blocks": "4", "recipe": "fp8"},
            lambda c: (c.recipe.name, c.recipe.keep_bf16.last_blocks) == ("fp8", 4),
        ),
        (
            {"recipe.wgrad.lhs.rht": "32", "recipe.wgrad.rhs.rht": "32"},
            lambda c: c.recipe.wgrad.lhs.rht == c.recipe.wgrad.rhs.rht == 32,
        ),
        ({"data.paths": "my text"}, lambda c: c.data.paths == (str(Path.cwd() / "my text"),)),
        ({"data.paths": "[a, b]"}, lambda c: c.data.paths == (str(Path.cwd() / "a"), str(Path.cwd() / "b"))),
    ],
)
def test_every_setting_can_be_overridden(overrides, read):
    assert read(load(overrides))


def test_a_run_of_a_changed_recipe_does_not_claim_its_publication():
    changed = load({"recipe.wgrad.lhs.rht": "32"})
    assert (changed.recipe.source, changed.recipe.taken) == ("nvfp4, changed", "")
    assert build(RunConfig, to_dict(changed)) == changed
    assert load({"recipe.wgrad.lhs.rht": "16"}).recipe == get_recipe("nvfp4")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"optim.lrr": "1"}, "unknown key 'lrr'. Did you mean 'lr'?"),
        ({"steps": "5"}, "setting: unknown key 'steps'. Did you mean 'train.steps'?"),
        ({"recipe.wgrad.lhs.rhtt": "16"}, "Did you mean 'rht'?"),
        ({"trian.steps": "1"}, "unknown key 'trian'. Did you mean 'train'?"),
        ({"recipe": "nvpf4"}, "Did you mean 'nvfp4'?"),
        ({"model": "tinny"}, "Did you mean 'tiny'?"),
        ({"optim.lr": "-1"}, "lr must be above 0, got -1.0"),
        ({"optim.lr": ".inf"}, "optim.lr must be a finite number, got inf"),
        ({"optim.grad_clip": "1e400"}, "optim.grad_clip must be a finite number, got inf"),
        ({"data.validation_fraction": ".nan"}, "data.validation_fraction must be a finite number, got nan"),
        ({"data.max_lost": "5"}, "max_lost must be between 0 and 1, got 5"),
        ({"data.validation_fraction": "0.7"}, "validation_fraction must be above 0 and at most 0.5, got 0.7"),
        ({"train.time_limit": ".nan"}, "train.time_limit must be a finite number, got nan"),
        ({"train.time_limit": "0"}, "time_limit must be above 0 minutes, or null, got 0"),
        ({"train.steps": "1e400"}, "train.steps must be a whole number or null, got inf"),
        ({"train.steps": "1e30"}, "steps must be at most 4,294,967,296"),
        ({"train.threads": "100000"}, "threads must be at most 1,024, got 100000"),
        ({"data.vocab_size": "1e12"}, "vocab_size must be at most 16,777,216, got 1000000000000"),
        ({"data.model_vocab_size": "1e12"}, "vocab_size must be at most 16,777,216"),
        ({"model.vocab_size": "1e12"}, "vocab_size must be at most 16,777,216"),
        ({"train.steps": "0"}, "steps must be at least 1, got 0"),
        ({"train.health_interval": "0"}, "health_interval must be at least 1, got 0"),
        ({"train.seq_len": "4096"}, "train.seq_len must be at most model.max_seq_len = 2048, got 4096"),
        ({"train.seq_len": "3", "train.micro_batch_size": "3"}, "must be a multiple of 16"),
        ({"train.steps": "5", "train.tokens": "5"}, "exactly one of steps and tokens"),
        ({"optim.decay_share": "0.99"}, "warmup_share + decay_share must be at most 1"),
    ],
)
def test_a_wrong_setting_is_named(overrides, text):
    with pytest.raises(ValueError) as error:
        load(overrides)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_config_names_the_nearest_preset():
    with pytest.raises(ValueError, match=r"no preset is called 'tinny'\. Did you mean 'tiny'\?"):
        load(source="tinny")


def test_tokens_are_rounded_up_to_whole_steps():
    train = TrainConfig(tokens=1000, micro_batch_size=2, gradient_accumulation=2, seq_len=64)
    assert (train.tokens_per_step, train.num_steps) == (256, 4)


def test_a_run_needs_a_model_and_a_length_and_trains_in_nvfp4_by_default():
    with pytest.raises(ValueError, match="needs a value for model, train"):
        config_from_mapping({})
    assert config_from_mapping({"model": "tiny", "train": {"steps": 1}}).recipe == get_recipe("nvfp4")


def test_differences_are_dotted_names():
    one = RUN_PRESETS["tiny"]
    other = replace(one, optim=replace(one.optim, lr=1.0), data=replace(one.data, paths=("a",)))
    assert differences(one, other) == ["data.paths", "optim.lr"]
    assert differences(one, one) == []


def test_stored_paths_mean_the_same_from_any_folder(tmp_path, monkeypatch):
    """Values that are not paths are unchanged."""
    monkeypatch.chdir(tmp_path)
    Path("words.json").write_text("{}", encoding="utf-8")
    given = {"data.paths": "[texts, notes=more/notes, stdlib, 'hf:some/set']", "data.tokenizer": "words.json"}
    first = load(given)
    assert first.data.paths == (
        f"{tmp_path}/texts",
        f"notes={tmp_path}/more/notes",
        "stdlib",
        "hf:some/set",
    )
    assert first.data.tokenizer == f"{tmp_path}/words.json"
    Path("config.yaml").write_text(dump_yaml(to_dict(first)), encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert load(source=str(tmp_path / "config.yaml")) == first
    assert load({"data.tokenizer": "tekken"}).data.tokenizer == "tekken"
