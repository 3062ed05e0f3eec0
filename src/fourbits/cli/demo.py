"""Train the tiny hybrid Mamba-Transformer in BF16, FP8, MXFP4, NVFP4 and a naive NVFP4, and write a report.

Trains a 1.3M-parameter model on your Python's standard library, half a million tokens per recipe; a few
minutes on two CPU cores. Rerun the command to resume an interrupted demo.

On a CPU, up to four runs execute in parallel, splitting the threads evenly.
"""

import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

from fourbits.cli.compare import add_common_arguments, compare_and_print, jobs_option
from fourbits.compare.run.run_matrix import build_matrix
from fourbits.train.presets import RUN_PRESETS

EXAMPLE = "fourbits demo --out runs/demo"

PRESET = "tiny"
RECIPES = ("bf16", "fp8", "mxfp4", "nvfp4", "nvfp4-naive")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--out", default="runs/demo", metavar="DIR", help="output folder (default: runs/demo)"
    )
    add_common_arguments(parser)


def run(args: Namespace) -> int:
    """Compare the five recipes with one seed."""
    out = Path(args.out)
    matrix = build_matrix(RUN_PRESETS[PRESET], PRESET, RECIPES, (0,), out)
    command = shlex.join(["fourbits", "demo", "--out", str(out), *jobs_option(args.jobs)])
    return compare_and_print(matrix, command, args.jobs, as_json=args.json)
