"""The commands of `fourbits`: one module each, imported only when its command runs.

A command module has a docstring and EXAMPLE (a command line that works), both shown by --help, and two
functions: `add_arguments(parser)` and `run(args) -> exit code`. With OVERRIDES = True, an option that the
parser does not declare is a setting: `--optim.lr 3e-4` becomes {"optim.lr": "3e-4"} in `args.overrides`.
"""

import sys
from argparse import ArgumentParser, Namespace
from importlib import import_module
from typing import Protocol, cast

# name -> its line in `fourbits --help`; the module is fourbits.cli.<name>
COMMANDS = {
    "demo": "train a tiny model, and measure and report what each technique of 4-bit training fixes",
    "presets": "list the presets: parameters, tokens, memory, and time on known GPUs",
    "train": "train a model with a recipe, or resume a run",
    "compare": "train with several recipes and seeds, and report how they differ",
    "protocol": "repeat a published comparison of 4-bit recipes on Llamas of 30M to 200M parameters",
    "recipes": "list the recipes, or show the precision of every GEMM operand in one",
    "lint": "find common mistakes in a configuration before training",
    "plan": "plan a run on a cluster: memory, layout, time, energy and cost, before you pay for it",
    "data": "turn text into token files, inspect them, or build a corpus",
    "eval": "measure a model on text and on tasks, and what a recipe costs it",
    "generate": "continue texts with the model of a run",
    "export": "write the model of a run for Hugging Face transformers",
    "bench": "measure the speed of quantizers, linear layers, or training steps",
    "doctor": "show what this machine can run, and why",
}


# commands that need POSIX, and the reason
_POSIX = {
    "demo": "its runs inherit pipes",
    "train": "it reads its peak memory with getrusage and is stopped by POSIX signals",
    "compare": "its runs inherit pipes",
    "protocol": "its runs inherit pipes",
}


class UnsupportedSystemError(ValueError):
    """A command was called on an operating system that does not support it."""


class Command(Protocol):
    """The interface of a command module."""

    EXAMPLE: str

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        ...

    def run(self, args: Namespace) -> int:
        """Run the command and return its exit code."""
        ...


def load(name: str) -> Command:
    """Import the module of a command. Raises UnsupportedSystemError on Windows if the command needs POSIX."""
    if sys.platform == "win32" and name in _POSIX:
        raise UnsupportedSystemError(
            f"needs Linux or macOS: {_POSIX[name]}. On Windows, run it in WSL 2, which is Linux."
        )
    return cast(Command, import_module(f"fourbits.cli.{name}"))
