"""Train several recipes with several seeds on one configuration, and report how they differ.

CONFIG is a shipped preset (tiny, 30m, hybrid-30m ...) or a YAML file; its recipe and seed are replaced by
--recipes and --seeds. A recipe is a shipped name or a YAML file. All recipes of a seed begin with the same
weights and read the same batches in the same order. Every other setting is an option, as in
--train.tokens 1e6. The same command again reuses finished runs and continues interrupted ones.

--jobs N makes N runs at a time, each in a process of its own on an equal share of the CPU threads. By
default a model with at most 10M weights in its linears, on a CPU, takes as many as there are threads, at most
4, and anything else one: a larger model fills all threads by itself, and N runs need N times the memory.
"""

import json
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fourbits.compare.compare import compare
from fourbits.compare.execute import Interrupted
from fourbits.compare.jobs import choose_jobs
from fourbits.compare.plan import Plan, make_plan
from fourbits.compare.print_table import print_table
from fourbits.compare.progress import CompareReport
from fourbits.train.config import load_config
from fourbits.train.presets import RUN_PRESETS

EXAMPLE = "fourbits compare tiny --recipes bf16 nvfp4 --seeds 0 1 --out runs/tiny-compare"
OVERRIDES = True

# Setting -> the option that takes its place here.
TAKEN = {"recipe": "--recipes", "train.seed": "--seeds"}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("config", metavar="CONFIG", help="a preset or a YAML file")
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=["bf16", "nvfp4"],
        metavar="NAME",
        help="recipes to compare (default: bf16 nvfp4); bf16 is the baseline if present, else the first",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="K", help="seeds (default: 0)")
    parser.add_argument(
        "--out", metavar="DIR", help="folder of the comparison (default: runs/compare-CONFIG)"
    )
    add_common_arguments(parser)


def add_common_arguments(parser: ArgumentParser) -> None:
    """Declare what `fourbits demo` has too."""
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at a time (default: by model and machine, see above)"
    )
    parser.add_argument("--json", action="store_true", help="print table.json instead of the table")


def run(args: Namespace) -> int:
    """Compare. 0: done; 130: stopped, to be continued by the same command."""
    for setting, option in TAKEN.items():
        given = [key for key in args.overrides if key == setting or key.startswith(f"{setting}.")]
        if given:
            raise ValueError(
                f"--{given[0]}: a comparison sets this itself. Use {option}; a recipe may be a file."
            )
    stem = Path(args.config).stem
    out = Path(args.out or f"runs/compare-{stem}")
    config = load_config(args.config, RUN_PRESETS, args.overrides)
    plan = make_plan(config, stem, args.recipes, args.seeds, out)
    return compare_and_print(plan, command_line(args, out), args.jobs, as_json=args.json)


def compare_and_print(plan: Plan, command: str, jobs: int | None, *, as_json: bool) -> int:
    """Make the runs, write table.json and report.html, and print the table and where the report is."""
    chosen = choose_jobs(plan, jobs)
    try:
        result = compare(plan, CompareReport(plan, Console(stderr=True)), command, chosen)
    except Interrupted:
        Console(stderr=True).print(f"stopped; to continue: {command}", markup=False, soft_wrap=True)
        return 130
    if as_json:
        print(json.dumps(result.record, indent=2))
        return 0
    print_table(result.rows, plan.baseline, plan.seeds)
    print(f"report: {result.report.resolve().as_uri()}")
    return 0


def command_line(args: Namespace, out: Path) -> str:
    """The command that repeats this comparison."""
    words: Sequence[str] = [
        *("fourbits", "compare", args.config, "--recipes", *args.recipes),
        *("--seeds", *map(str, args.seeds), "--out", str(out)),
        *jobs_option(args.jobs),
        *(word for key, value in args.overrides.items() for word in (f"--{key}", value)),
    ]
    return shlex.join(words)


def jobs_option(jobs: int | None) -> list[str]:
    """--jobs as it was given."""
    return [] if jobs is None else ["--jobs", str(jobs)]
