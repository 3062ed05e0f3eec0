"""The commands of `fourbits`: one module each, loaded only when its command runs.

A command module has a docstring and EXAMPLE (a line that works), both shown by --help, and two functions:
`add_arguments(parser)` and `run(args) -> exit code`. With OVERRIDES = True an option that its parser does not
know is a setting: `--optim.lr 3e-4` arrives in `args.overrides` as {"optim.lr": "3e-4"}.
"""

from argparse import ArgumentParser, Namespace
from importlib import import_module
from typing import Protocol, cast

# name -> what `fourbits --help` says about it; the module is fourbits.cli.<name>
COMMANDS = {
    "demo": "train the tiny model in five precisions and report how they compare",
    "train": "train a model by a recipe, or continue a run",
    "compare": "train several recipes and seeds on one configuration, and report",
    "recipes": "list the recipes, or show the precision of every operand in one",
    "data": "prepare text as token files, inspect them, build a corpus",
    "bench": "measure the speed of quantizers, linears or steps, beside BF16",
    "doctor": "say what this machine can run, and why",
}


class Command(Protocol):
    """What a command module offers."""

    EXAMPLE: str

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        ...

    def run(self, args: Namespace) -> int:
        """Do the work; the exit code."""
        ...


def load(name: str) -> Command:
    """The module of a command in the table."""
    return cast(Command, import_module(f"fourbits.cli.{name}"))
