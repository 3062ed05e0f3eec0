"""Train the tiny hybrid Mamba-Transformer in BF16, FP8, MXFP4, NVFP4 and a naive NVFP4, and report.

A model of about 1.5M parameters learns from the standard library of this Python, half a million tokens in
each precision; a few minutes on two CPU cores. The same command again continues what was interrupted.

On a CPU as many runs are made at a time as there are threads, at most 4, each on an equal share of them.
"""

import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

from fourbits.cli.compare import add_common_arguments, compare_and_print, jobs_option
from fourbits.compare.plan import make_plan
from fourbits.train.presets import RUN_PRESETS

EXAMPLE = "fourbits demo --out runs/demo"

PRESET = "tiny"
RECIPES = ("bf16", "fp8", "mxfp4", "nvfp4", "nvfp4-naive")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="folder (default: runs/demo)")
    add_common_arguments(parser)


def run(args: Namespace) -> int:
    """Compare the five recipes with one seed."""
    out = Path(args.out)
    plan = make_plan(RUN_PRESETS[PRESET], PRESET, RECIPES, (0,), out)
    command = shlex.join(["fourbits", "demo", "--out", str(out), *jobs_option(args.jobs)])
    return compare_and_print(plan, command, args.jobs, as_json=args.json)
