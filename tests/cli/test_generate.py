"""`fourbits generate`: a text streams, several are printed in order, and errors are one line with code 2."""

from pathlib import Path
from typing import Any

import pytest

from fourbits.cli.main import main

RUN = """
model: {{vocab_size: 384, d_model: 16, pattern: "M*-", d_ffn: 32, num_heads: 1, num_kv_heads: 1, head_dim: 16,
  mamba_num_heads: 1, mamba_head_dim: 16, state_size: 16, num_groups: 1, max_seq_len: 64}}
recipe: {{base: nvfp4, keep_bf16: {{first_blocks: 0, last_blocks: 0}}}}
data: {{vocab_size: 384, paths: ["{text}"]}}
train: {{steps: 2, micro_batch_size: 2, seq_len: 16, validation_samples: 2, compile: none, threads: 1,
  device: cpu}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text.md"
    text.write_text("Every block has sixteen codes and one scale. " * 400)
    (folder / "run.yaml").write_text(RUN.format(text=text))
    assert main(["train", str(folder / "run.yaml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def generated(*argv: Any) -> int:
    return main(["generate", *map(str, argv), "--device", "cpu"])


@pytest.mark.parametrize("recipe", ["bf16", "trained"])
def test_a_text_alone_and_among_others_is_continued_alike(run, capsys, recipe):
    options = ("--tokens", 8, "--recipe", recipe)
    assert generated(run, "Every block", *options) == 0
    alone = capsys.readouterr().out
    assert alone.startswith("Every block")
    assert generated(run, "Every block", "scale", *options) == 0
    both = capsys.readouterr().out
    assert both.startswith(alone)
    assert both.count("\n\n") == 2


def test_the_precision_of_training_changes_the_draws(run, capsys):
    texts = {}
    for recipe in ("bf16", "trained"):
        generated(run, "Every", "--tokens", 40, "--temperature", 1.5, "--recipe", recipe)
        texts[recipe] = capsys.readouterr().out
    assert texts["bf16"] != texts["trained"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tokens", 100), "at most max_seq_len = 64 tokens"),
        (("--temperature", -1), "temperature must be at least 0"),
        (("--top-k", 0), "top_k must be at least 1"),
    ],
)
def test_settings_out_of_range_are_one_line(run, capsys, options, message):
    assert generated(run, "Every block", *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_folder_that_is_no_run_is_named(tmp_path, capsys):
    assert generated(tmp_path, "text") == 2
    assert "not a run folder" in capsys.readouterr().err
