"""Train the tiny hybrid Mamba-Transformer in BF16 and NVFP4, and report what each technique of NVFP4 fixes.

Trains a 1.3M-parameter model on your Python's standard library, half a million tokens per recipe, then
measures on the trained BF16 model what scales, stochastic rounding, 2D scaling and the Hadamard transform
each fix; a few minutes on two CPU cores. --full trains five recipes with three seeds, which takes about seven
times as long and gives confidence intervals. Rerun the command to resume an interrupted demo.

`fourbits compare tiny --techniques` is the same with options. On a CPU, up to four runs execute in parallel,
splitting the threads evenly.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fourbits.cli.compare import DEFAULTS, add_common_arguments, compare_and_print, matrix_of

EXAMPLE = "fourbits demo --out runs/demo"

PRESET = "tiny"
RECIPES = ("bf16", "nvfp4")
FULL_RECIPES = ("bf16", "fp8", "mxfp4", "nvfp4", "nvfp4-naive")
FULL_SEEDS = (0, 1, 2)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--out", default="runs/demo", metavar="DIR", help="output folder (default: runs/demo)"
    )
    parser.add_argument(
        "--full", action="store_true", help=f"train {', '.join(FULL_RECIPES)} with seeds 0, 1 and 2"
    )
    add_common_arguments(parser)


def run(args: Namespace) -> int:
    """Compare the recipes, and measure the techniques."""
    chosen = Namespace(
        **vars(args) | DEFAULTS | {"config": PRESET, "techniques": True},
        recipes=FULL_RECIPES if args.full else RECIPES,
        seeds=FULL_SEEDS if args.full else (0,),
    )
    options = [
        *(("--full",) if args.full else ()),
        *(("--average", str(args.average)) if args.average > 1 else ()),
    ]
    resume = ["demo", *options, "--out", args.out]
    return compare_and_print(chosen, matrix_of(chosen, Path(args.out), chosen.recipes), resume)
