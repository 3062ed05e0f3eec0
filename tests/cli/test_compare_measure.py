"""`fourbits compare --proxies` and `--sensitivity` on the command line."""

import json
import random
from pathlib import Path

import pytest

from fourbits.cli.main import main
from fourbits.recipe.presets import get_recipe

CONFIG = """
model: {{vocab_size: 384, d_model: 32, pattern: "-", d_ffn: 64}}
recipe: bf16
data: {{paths: ["{text}"], vocab_size: 384}}
train: {{steps: 2, micro_batch_size: 1, seq_len: 32, validation_samples: 4, threads: 1, device: cpu,
  compile: none}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    rng = random.Random(0)
    words = ["every", "block", "has", "a", "scale", "and", "every", "tensor", "has", "one", "more"]
    (folder / "text.txt").write_text(" ".join(rng.choice(words) for _ in range(3000)), encoding="utf-8")
    (folder / "small.yaml").write_text(CONFIG.format(text=folder / "text.txt"), encoding="utf-8")
    return folder / "small.yaml"


def test_only_the_bf16_run_is_trained_and_a_recipe_is_proposed(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    argv = ["compare", str(config), "--proxies", "--sensitivity", "--keep-flops", "0.5", "--out", str(out)]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert sorted(path.parent.name for path in out.glob("*/seed0")) == ["bf16"]
    assert "blocks.0.mixer.up_proj" in text
    assert "proposed layers" in text
    record = json.loads((out / "sensitivity.json").read_text())
    assert record["budget"] == 0.5
    assert get_recipe(out / "nvfp4-sensitive.yaml").layers[0].names == tuple(record["proposal"]["layers"])
    assert [row["recipe"] for row in json.loads((out / "proxies.json").read_text())["rows"]] == ["nvfp4"]

    again = tmp_path / "again"
    argv = ["compare", str(config), "--proxies", "--from", str(out / "bf16/seed0"), "--json"]
    assert main([*argv, "--ablate", "rht", "--recipes", "nvfp4", "--out", str(again)]) == 0
    rows = json.loads(capsys.readouterr().out)["proxies"]["rows"]
    assert [row["recipe"] for row in rows] == ["nvfp4", "nvfp4-without-rht"]
    assert not list(again.glob("*/seed0")), "with --from nothing is trained"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "runs/x"], "--from: requires --proxies or --sensitivity."),
        (["--proxies", "--keep-flops", "0.1"], "--keep-flops: requires --sensitivity."),
        (["--measure-tokens", "5"], "--measure-tokens: requires --proxies or --sensitivity."),
        (["--proxies", "--measure-tokens", "0"], "--measure-tokens: must be at least 1, got 0."),
        (["--proxies", "--techniques"], "Run it as a second command."),
        (["--sensitivity", "--recipes", "nvfp4", "mxfp4"], "one besides bf16, got nvfp4, mxfp4."),
        (["--proxies", "--recipes", "bf16"], "a recipe besides bf16 to measure, got none."),
        (["--proxies", "--from", "nowhere"], "nowhere: not a run folder"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
):
    assert main(["compare", str(config), "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out/bf16").exists()
