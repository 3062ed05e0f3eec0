"""Command-line parsing: one-line errors that suggest the nearest option, and settings as dotted options."""

import argparse
import inspect
import math
import sys
from pathlib import Path
from typing import Any, NoReturn

from fourbits.cli.commands import COMMANDS, Command
from fourbits.settings import nearest

EMPTY = "empty, as from a variable that is not set"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error in one line and exits with code 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", Path, _path)
        self.register("type", int, _whole)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        """Print the error and how to get help."""
        end = "" if message.endswith((".", "?")) else "."
        print(f"{self.prog}: {message}{end} See {self.prog} --help.", file=sys.stderr)
        raise SystemExit(2)

    def options(self) -> list[str]:
        """Every declared option, such as --out, of this parser and its subcommands."""
        parsers = self.actions().values()
        return [*self._option_string_actions, *(option for parser in parsers for option in parser.options())]

    def word_of(self, name: str) -> str:
        """How a user writes the argument that is stored as `name`: its option, or its name in capitals."""
        for parser in (self, *self.actions().values()):
            for action in parser._actions:
                if action.dest == name and action.option_strings:
                    return action.option_strings[0]
        return name.upper()

    def actions(self) -> "dict[str, Parser]":
        """The parsers of its subcommands, by name."""
        choices = [action.choices for action in self._actions if isinstance(action.choices, dict)]
        return {
            name: parser
            for choice in choices
            for name, parser in choice.items()
            if isinstance(parser, Parser)
        }

    def refuse_option(self, option: str) -> NoReturn:
        """Report an unknown option, and suggest the nearest one, or the subcommands that have it."""
        owners = [name for name, parser in self.actions().items() if option in parser.options()]
        if owners:
            self.error(f"{option} is an option of {', '.join(f'{self.prog} {name}' for name in owners)} only")
        self.error(f"unknown option {option}.{nearest(option, self.options())}")


def _path(text: str) -> Path | str:
    """A path; an empty string is returned unchanged, because Path("") is the working directory."""
    return Path(text) if text else text


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(_not("a whole number", text, "8")) from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(_not("a finite number", text, "0.5"))
    return value


def _not(rule: str, text: str, example: str) -> str:
    return f"must be {rule}, got {text!r}. Pass one such as {example}" if text else f"is {EMPTY}"


def add_action(actions: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    """An action of a command, with separate help.

    actions: the result of add_subparsers; summary: also used as its description; example: a command line.
    """
    return actions.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def command_parser(name: str, command: Command) -> Parser:
    """The parser of one command; its help shows the module's docstring and example."""
    parser = Parser(
        prog=f"fourbits {name}",
        description=inspect.getdoc(command),
        epilog=f"example:\n  {command.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    return parser


def parse(name: str, command: Command, argv: list[str]) -> argparse.Namespace:
    """Parse the arguments of one command; settings are collected in `overrides` if the command takes them."""
    parser = command_parser(name, command)
    overrides: dict[str, str] = {}
    if getattr(command, "OVERRIDES", False):
        argv, overrides = split_overrides(parser, argv)
    args, unknown = parser.parse_known_args(argv)
    for argument in unknown:
        if argument.startswith("-"):
            parser.refuse_option(argument.partition("=")[0])
        parser.error(f"unexpected argument {argument!r}")
    for name, value in vars(args).items():
        if value == "" or (isinstance(value, list) and "" in value):
            parser.error(f"{parser.word_of(name)} is {EMPTY}")
    args.overrides = overrides
    return args


def split_overrides(parser: Parser, argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Split argv into arguments that the parser declares and settings, `--key value` or `--key=value`."""
    kept: list[str] = []
    overrides: dict[str, str] = {}
    rest = iter(argv)
    for argument in rest:
        option, equals, value = argument.partition("=")
        if not option.startswith("--") or option == "--" or option in parser.options():
            kept.append(argument)
            continue
        key = option.removeprefix("--")
        if "." not in key and nearest(option, parser.options(), cutoff=0.85):
            parser.refuse_option(option)
        if not equals:
            value = next(rest, "--")
            if value.startswith("--"):
                parser.error(f"the setting {option} needs a value, as in {option} VALUE")
        if not value:
            parser.error(f"{option} is {EMPTY}; to unset it, pass null")
        overrides[key] = value
    return kept, overrides


def main_parser() -> Parser:
    """The parser of `fourbits` itself, which only selects the command."""
    width = max(map(len, COMMANDS))
    table = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        prog="fourbits",
        usage="fourbits COMMAND ... | fourbits COMMAND --help",
        description="Pretrain language models in 4-bit floating point (NVFP4).",
        epilog=f"commands:\n{table}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
