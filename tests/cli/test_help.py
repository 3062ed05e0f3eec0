"""Every command and every action of one has a help with an example, and the examples parse."""

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

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


@pytest.mark.parametrize(("name", "parser"), all_parsers(), ids=[name for name, _ in all_parsers()])
def test_an_empty_value_of_any_option_is_refused(
    name: str, parser: Parser, capsys: pytest.CaptureFixture[str]
):
    """As of a variable that is not set: an empty path would be the working directory."""
    _, command, *rest = shlex.split(example(parser))
    taking_text = [a for a in parser._actions if a.option_strings and a.type in (None, Path) and a.nargs != 0]
    for action in taking_text:
        option = action.option_strings[0]
        with pytest.raises(SystemExit) as stop:
            parse(command, load(command), [*rest, option, ""])
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert f"{option} is empty" in error or f"argument {option}: invalid choice: ''" in error


@pytest.mark.parametrize(
    ("words", "name"),
    [(["eval", ""], "MODEL"), (["export", "", "--out", "x"], "RUN"), (["generate", "", "text"], "RUN")],
)
def test_an_empty_run_is_refused(words: list[str], name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        parse(words[0], load(words[0]), words[1:])
    assert stop.value.code == 2
    assert f"{name} is empty" in capsys.readouterr().err


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
