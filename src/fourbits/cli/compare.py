"""Train with several recipes and seeds on one configuration, and report how the recipes differ.

CONFIG is a shipped preset (tiny, 30m, hybrid-30m ...) or a YAML file; --recipes and --seeds replace its
recipe and seed. A recipe is a shipped name or a YAML file. For each seed, all recipes start from the same
weights and read the same batches in the same order. Every other setting is an option, such as
--train.tokens 1e6. Rerun the command to reuse finished runs and resume interrupted ones.

--jobs N executes N runs in parallel, each in its own process with an equal share of the CPU threads and one
of the GPUs that CUDA_VISIBLE_DEVICES allows, several runs to a GPU if N is larger. Default: one run per GPU;
on a CPU one per thread, up to 4, for models with at most 10M linear weights, otherwise 1, because a larger
model uses all threads by itself and N runs need N times the memory.

With one seed, differences are noise; with several, the gap to the baseline has a 95 % confidence interval.
--stop-early looks at the intervals after each seed, drops recipes that are worse than the best, and ends when
the last one is separated from the baseline; the error of all looks together stays 5 %.

--fork-after SHARE trains only the baseline from the beginning. The other recipes continue its runs after this
share of the steps: 0.8 compares the last fifth, with about a twentieth of the noise of whole runs.

--proxies and --sensitivity measure the recipes on the trained bf16 run of the first seed, or on the run that
--from names, without training them: the cost of quantization in loss and gradient, by recipe or by layer.
--sensitivity also writes OUT/RECIPE-sensitive.yaml, a recipe that keeps the costliest layers in BF16.

--ablate TECHNIQUE ... also trains the recipe without each of the techniques named: rht, sr, 2d, 4over6,
bf16-blocks.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from fourbits.cli.compare_measure import add_measure_arguments, check_options, measure_and_print
from fourbits.cli.program import again, change_folder, command_line
from fourbits.compare.compare import Commands, compare
from fourbits.compare.report.caveats import forked_from
from fourbits.compare.report.print_table import print_comparison
from fourbits.compare.report.side_table import print_side_table
from fourbits.compare.run.execute import Interrupted
from fourbits.compare.run.forked import forked
from fourbits.compare.run.jobs import Jobs, choose_jobs
from fourbits.compare.run.progress import MatrixProgress
from fourbits.compare.run.run_matrix import BASELINE, RunMatrix, build_matrix
from fourbits.train.config import load_config
from fourbits.train.presets import RUN_PRESETS
from fourbits.train.stop import exit_code

EXAMPLE = "fourbits compare tiny --recipes bf16 nvfp4 --seeds 0 1 --out runs/tiny-compare"
OVERRIDES = True

# Setting -> the option of `fourbits compare` that replaces it.
REPLACED = {"recipe": "--recipes", "train.seed": "--seeds"}

# Options that `fourbits demo` does not have.
DEFAULTS = {"ablate": (), "stop_early": False, "proxies": False, "sensitivity": False} | dict.fromkeys(
    ("from_run", "keep_flops", "measure_tokens", "fork_after")
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("config", metavar="CONFIG", help="a preset or a YAML file")
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=["bf16", "nvfp4"],
        metavar="NAME",
        help="recipes to compare (default: bf16 nvfp4); the baseline is bf16 if present, else the first",
    )
    add_seed_arguments(parser)
    parser.add_argument(
        "--ablate",
        nargs="+",
        default=[],
        metavar="TECHNIQUE",
        help="also train the recipe besides bf16 without each of these techniques",
    )
    parser.add_argument(
        "--fork-after",
        type=float,
        metavar="SHARE",
        help="train the baseline alone up to this share of the steps, and let the other recipes continue it",
    )
    parser.add_argument("--out", metavar="DIR", help="output folder (default: runs/compare-CONFIG)")
    add_measure_arguments(parser)
    parser.add_argument(
        "--techniques",
        action="store_true",
        help="also measure what each technique fixes, on the trained bf16 model of the first seed",
    )
    add_common_arguments(parser)


def add_seed_arguments(parser: ArgumentParser) -> None:
    """Declare the options shared with `fourbits protocol`."""
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="K", help="seeds (default: 0)")
    parser.add_argument(
        "--stop-early",
        action="store_true",
        help="go seed by seed, drop recipes that are worse, and stop when intervals are separated",
    )


def add_common_arguments(parser: ArgumentParser) -> None:
    """Declare the options shared with `fourbits demo`."""
    parser.add_argument(
        "--average",
        type=int,
        default=1,
        metavar="K",
        help="also compare the mean of the weights of the last K checkpoints",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs in parallel (default: depends on the machine, see above)"
    )
    parser.add_argument("--json", action="store_true", help="print table.json instead of the table")


def run(args: Namespace) -> int:
    """Compare. 0: done; 129, 130 or 143: stopped by a signal, and the same command resumes."""
    for setting, option in REPLACED.items():
        given = [key for key in args.overrides if key == setting or key.startswith(f"{setting}.")]
        if given:
            raise ValueError(
                f"--{given[0]}: cannot be set for a comparison. Use {option}; a recipe can be a YAML file."
            )
    out = Path(args.out or f"runs/compare-{Path(args.config).stem}")
    if check_options(args):
        return _measure(args, out)
    return compare_and_print(args, matrix_of(args, out, args.recipes), words(args, out))


def matrix_of(args: Namespace, out: Path, recipes: Sequence[str]) -> RunMatrix:
    """The runs that the options of `fourbits compare` ask for."""
    config = load_config(args.config, RUN_PRESETS, args.overrides)
    matrix = build_matrix(config, Path(args.config).stem, recipes, args.seeds, out, args.ablate)
    return matrix if args.fork_after is None else forked(matrix, args.fork_after)


def _measure(args: Namespace, out: Path) -> int:
    """Like `compare_and_print`, for measurements on a bf16 run."""
    recipes = args.recipes if BASELINE in args.recipes else [BASELINE, *args.recipes]
    matrix = matrix_of(args, out, recipes)
    resume = command_line(words(args, out))
    try:
        return measure_and_print(args, matrix, choose_jobs(matrix, args.jobs), resume)
    except Interrupted as stop:
        return _stopped(stop, resume)


def _stopped(stop: Interrupted, resume: str) -> int:
    Console(stderr=True).print(f"stopped; resume with: {resume}", markup=False, soft_wrap=True)
    return exit_code(stop.signal.name)


def compare_and_print(
    args: Namespace,
    matrix: RunMatrix,
    resume: Sequence[str],
    words_of: Callable[[Namespace, Path], list[str]] | None = None,
) -> int:
    """Execute the runs, write table.json and report.html, and print the table and the report's location.

    args: with the options of `add_common_arguments`, techniques and stop_early; resume: the words of the
    command that continues this one, without --jobs; words_of: the words of a command that does the same in
    another folder, by default of `fourbits compare`.
    """
    jobs = choose_jobs(matrix, args.jobs)
    commands = Commands(
        command_line([*resume, *(() if args.jobs is None else ("--jobs", str(args.jobs)))]),
        repetition(args, matrix, jobs, words_of or words),
    )
    progress = MatrixProgress(matrix, Console(stderr=True))
    try:
        result = compare(
            *(matrix, progress, commands, jobs),
            techniques=args.techniques,
            stop_early=args.stop_early,
            average=args.average,
        )
    except Interrupted as stop:
        return _stopped(stop, commands.resume)
    if args.json:
        print(json.dumps(result.record, indent=2))
        return 0
    found = result.comparison
    print_comparison(result.rows, matrix.baseline, found.seeds, raced=bool(found.stops))
    if found.fork_step is not None:
        print(forked_from(found))
    for table in result.tables:
        print_side_table(table)
    print(f"report: {result.report.resolve().as_uri()}")
    return 0


def words(args: Namespace, out: Path) -> list[str]:
    """The words of the command that runs this comparison, without --jobs."""
    return [
        *("compare", args.config, "--recipes", *args.recipes, "--seeds", *map(str, args.seeds)),
        *(("--ablate", *args.ablate) if args.ablate else ()),
        *(("--stop-early",) if args.stop_early else ()),
        *(("--fork-after", f"{args.fork_after:g}") if args.fork_after is not None else ()),
        *(("--average", str(args.average)) if args.average > 1 else ()),
        *(("--techniques",) if args.techniques else ()),
        *(("--proxies",) if args.proxies else ()),
        *(("--sensitivity",) if args.sensitivity else ()),
        *(("--from", args.from_run) if args.from_run else ()),
        *(("--keep-flops", f"{args.keep_flops:g}") if args.keep_flops is not None else ()),
        *(("--measure-tokens", str(args.measure_tokens)) if args.measure_tokens else ()),
        *("--out", str(out)),
        *(word for key, value in args.overrides.items() for word in (f"--{key}", value)),
    ]


def repetition(
    args: Namespace, matrix: RunMatrix, jobs: Jobs, words_of: Callable[[Namespace, Path], list[str]]
) -> tuple[str, ...]:
    """Commands that repeat the comparison, and one of its runs, bit for bit, in new folders.

    They state the number of runs in parallel and of threads, which otherwise depend on the machine's load.
    """
    first, new = matrix.runs[0], again(matrix.out)
    threads = ("--train.threads", str(jobs.threads))
    one = ("train", str(first.folder / "config.yaml"), "--out", f"{new}-{first.recipe}-seed{first.seed}")
    settings = {key: value for key, value in args.overrides.items() if key != "train.threads"}
    whole = words_of(Namespace(**vars(args) | {"overrides": settings}), new)
    return (
        change_folder(),
        command_line([*whole, "--jobs", str(jobs.parallel), *threads]),
        command_line([*one, *threads]),
    )
