"""List the run presets: what they train, on how many tokens, in how much memory, and for how long.

Pass a name to `fourbits train` or `fourbits compare`. Memory and time are those of nvfp4 on one device,
measured where the table names it. For other presets, memory is at least that of weights, gradients and
optimizer, and time is between bounds: an H100 or H200 at the lowest and at the highest utilization measured.
"""

import json
from argparse import ArgumentParser, Namespace

from rich.table import Table

from fourbits.compare.number_format import DASH, long_duration, mebibytes, short_count
from fourbits.compare.terminal import print_table
from fourbits.settings import to_dict
from fourbits.train.preset_figures import PresetFigures, preset_figures

EXAMPLE = "fourbits presets"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: Namespace) -> int:
    """Print the presets."""
    found = preset_figures()
    if args.json:
        print(json.dumps([to_dict(each) for each in found], indent=2))
        return 0
    table = Table("preset", "blocks")
    for name in ("parameters", "tokens", "tokens/step", "memory", "time"):
        table.add_column(name, justify="right")
    table.add_column("measured on")
    for each in found:
        table.add_row(
            each.name,
            _blocks(each.pattern),
            short_count(each.parameters),
            short_count(each.tokens),
            short_count(each.tokens_per_step),
            _memory(each),
            _time(each),
            each.measured.device if each.measured else DASH,
        )
    print_table(table)
    return 0


def _blocks(pattern: str) -> str:
    """'20 Transformer', or a hybrid's blocks by kind: '5 Mamba-2, 5 FFN, 2 attention'."""
    kinds = {"T": "Transformer", "M": "Mamba-2", "-": "FFN", "*": "attention"}
    return ", ".join(f"{pattern.count(letter)} {kind}" for letter, kind in kinds.items() if letter in pattern)


def _memory(each: PresetFigures) -> str:
    if each.measured:
        return mebibytes(each.measured.peak_bytes)
    return f"over {mebibytes(each.state_bytes)}"


def _time(each: PresetFigures) -> str:
    if each.seconds is None:
        return "several GPUs"
    low, high = (long_duration(seconds) for seconds in each.seconds)
    return low if low == high else f"{low} to {high}"
