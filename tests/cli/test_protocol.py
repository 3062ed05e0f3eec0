"""`fourbits protocol` on the command line."""

import json
import shlex

import pytest

from fourbits.cli import protocol
from fourbits.cli.commands import load
from fourbits.cli.main import main
from fourbits.cli.parser import parse
from fourbits.compare.published import find_cell
from fourbits.model.config import ModelConfig
from fourbits.settings import override

SMALL = {
    "data.vocab_size": 384,
    "train.steps": 4,
    "train.micro_batch_size": 1,
    "train.gradient_accumulation": 1,
    "train.seq_len": 32,
    "train.validation_interval": 2,
    "train.validation_samples": 1,
    "train.checkpoint_interval": None,
    "train.threads": 1,
    "train.device": "cpu",
    "train.compile": "none",
}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The protocol with a model of two layers and four steps."""
    text = tmp_path / "text.txt"
    text.write_text("every block has a scale and every tensor has one more " * 300, encoding="utf-8")
    published = protocol.published_config

    def config(cell):
        found = override(published(cell), {**SMALL, "train.tokens": None, "data.validation_fraction": 0.05})
        model = ModelConfig(vocab_size=384, d_model=32, pattern="-", d_ffn=64)
        return override(found, {"model": model})

    monkeypatch.setattr(protocol, "published_config", config)
    return ["protocol", "30m", "--data.paths", str(text), "--out", str(tmp_path / "out"), "--jobs", "1"]


def test_published_gaps_stand_beside_those_of_the_runs(small, tmp_path, capsys):
    assert main([*small, "--recipes", "quartet2-46"]) == 0
    out = capsys.readouterr().out
    assert "Published: Llama 30m, 750M tokens of C4" in out
    row = next(line for line in out.splitlines() if line.startswith("quartet2-46") and "+1.26" in line)
    assert "+0.0430" in row
    record = json.loads((tmp_path / "out" / "table.json").read_text())
    assert [each["recipe"] for each in record["rows"]] == ["bf16", "quartet2-46"]
    (published,) = record["published"]
    assert published["published_gap_nats"] == 0.0430
    assert published["gap_nats"] == record["rows"][1]["gap_nats"]
    assert "Published: Llama 30m" in (tmp_path / "out" / "report.html").read_text()


def test_the_report_repeats_the_command_that_made_it(small, tmp_path):
    assert main([*small, "--recipes", "quartet2"]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "fourbits protocol 30m --recipes quartet2 --seeds 0" in page


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--train.steps", "5"],
            "--train.steps: is part of the protocol. Use --recipes, --seeds and --tokens",
        ),
        (["--model.d_model", "64"], "--model.d_model: is part of the protocol."),
        (["--recipe.sums", "exact"], "--recipe.sums: is part of the protocol."),
        (["--recipes", "nvfp4"], "no recipe of the protocol is called 'nvfp4'"),
        (["--tokens", "1e9"], "Pass one of 0.75e9, 1.5e9, 3e9, 12e9."),
    ],
)
def test_other_settings_are_refused_with_a_remedy(argv, message, capsys):
    assert main(["protocol", "30m", *argv]) == 2
    assert message in capsys.readouterr().err


def test_the_words_of_a_command_parse_to_the_same_command(tmp_path):
    given = ["30m", "--tokens", "1.5e9", "--recipes", "quartet2", "--seeds", "0", "1", "--stop-early"]
    args = parse("protocol", load("protocol"), [*given, "--data.paths", "c4"])
    again = protocol._words(args, tmp_path)
    assert parse("protocol", load("protocol"), again[1:]).__dict__ == {
        **args.__dict__,
        "out": str(tmp_path),
    }, shlex.join(again)
    assert find_cell("30m", args.tokens).tokens == 1_499_987_968
