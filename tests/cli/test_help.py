"""Every command and every action of one has a help with an example, and the examples parse."""

import argparse
import shlex
from collections.abc import Iterator

import pytest

from fourbits.cli.commands import COMMANDS, load
from fourbits.cli.main import main
from fourbits.cli.parser import Parser, command_parser, parse

# What each example needs is in the help's own words; these run in seconds on a CPU.
QUICK = ["recipes", "doctor", "presets"]


def parsers(name: str, parser: Parser) -> Iterator[tuple[str, Parser]]:
    yield name, parser
    for action, each in parser.actions().items():
        yield from parsers(f"{name} {action}", each)


def all_parsers() -> list[tuple[str, Parser]]:
    return [found for name in COMMANDS for found in parsers(name, command_parser(name, load(name)))]


def example(parser: argparse.ArgumentParser) -> str:
    return parser.format_help().split("example:\n")[1].strip()


@pytest.mark.parametrize(("name", "parser"), all_parsers(), ids=[name for name, _ in all_parsers()])
def test_a_help_has_an_example_of_its_own_that_parses(name: str, parser: Parser):
    program, command, *rest = shlex.split(example(parser))
    assert program == "fourbits"
    assert [command, *rest][: len(name.split())] == name.split()
    parse(command, load(command), rest)


def test_every_benchmark_and_every_data_action_has_a_help_of_its_own():
    names = {name for name, _ in all_parsers()}
    benchmarks = {"quantize", "linear", "experts", "ssd", "step", "model", "ranks", "hf", "data"}
    assert {f"bench {name}" for name in benchmarks} <= names
    assert {"data prepare", "data inspect", "data corpus"} <= names


def test_the_help_of_a_benchmark_lists_only_its_own_options(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["bench", "step", "--help"])
    out = capsys.readouterr().out
    assert "--device" in out
    assert "--seq-len" not in out


@pytest.mark.parametrize("name", QUICK)
def test_an_example_runs(name: str, capsys: pytest.CaptureFixture[str]):
    assert main(shlex.split(load(name).EXAMPLE)[1:]) == 0
    assert capsys.readouterr().out


def test_the_examples_of_data_run_one_after_the_other(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for action in ("prepare", "inspect"):
        parser = command_parser("data", load("data")).actions()[action]
        assert main(shlex.split(example(parser))[1:]) == 0
    assert "sample 0" in capsys.readouterr().out
