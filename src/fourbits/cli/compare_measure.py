"""`fourbits compare --proxies` and `--sensitivity`: measure recipes on one BF16 checkpoint."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fourbits.compare.number_format import DASH, percent, signed
from fourbits.compare.proxies.findings import Choice, Cost, Proxies, Sensitivity
from fourbits.compare.proxies.measure import measure_proxies, opened
from fourbits.compare.proxies.proposal import measure_sensitivity, write_recipe
from fourbits.compare.report.side_table import SideTable, print_side_table
from fourbits.compare.run.execute import execute_runs
from fourbits.compare.run.jobs import Jobs
from fourbits.compare.run.progress import MatrixProgress
from fourbits.compare.run.run_matrix import BASELINE, RunMatrix
from fourbits.data.whole_file import write_json
from fourbits.device import probe
from fourbits.recipe.recipe import Recipe
from fourbits.settings import to_dict

PROXIES_JSON, SENSITIVITY_JSON = "proxies.json", "sensitivity.json"
#: tokens that a GPU measures by default; a CPU measures three batches
GPU_TOKENS = 262_144


def add_measure_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--proxies",
        action="store_true",
        help="train bf16 alone, and measure loss and gradient of the recipes on it",
    )
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="train bf16 alone, rank its layers by what the recipe costs in each, and propose a recipe",
    )
    parser.add_argument(
        "--from",
        dest="from_run",
        metavar="RUN",
        help="with --proxies or --sensitivity: measure this run, and train nothing",
    )
    parser.add_argument(
        "--keep-flops",
        type=float,
        metavar="SHARE",
        help="with --sensitivity: share of linear-layer FLOPs to keep in BF16 (default: the recipe's own)",
    )
    parser.add_argument(
        "--measure-tokens",
        type=int,
        metavar="N",
        help="with these two: validation tokens (default: three batches on a CPU, 262,144 on a GPU)",
    )


def check_options(args: Namespace) -> bool:
    """Whether to measure instead of training. Raises ValueError for incompatible options."""
    measures = bool(args.proxies or args.sensitivity)
    needs = {
        "--from": args.from_run is not None and not measures,
        "--measure-tokens": args.measure_tokens is not None and not measures,
        "--keep-flops": args.keep_flops is not None and not args.sensitivity,
    }
    for option, missing in needs.items():
        if missing:
            mode = "--sensitivity" if option == "--keep-flops" else "--proxies or --sensitivity"
            raise ValueError(f"{option}: requires {mode}. Add it, or remove {option}.")
    given_options = {
        "--techniques": args.techniques,
        "--stop-early": args.stop_early,
        "--fork-after": args.fork_after is not None,
    }
    for option, given in given_options.items():
        if measures and given:
            raise ValueError(
                f"{option}: is for a comparison that trains its recipes, which --proxies and --sensitivity "
                "do not. Run it as a second command."
            )
    if args.measure_tokens is not None and args.measure_tokens < 1:
        raise ValueError(
            f"--measure-tokens: must be at least 1, got {args.measure_tokens}. Omit it for its default."
        )
    return measures


def measure_and_print(args: Namespace, matrix: RunMatrix, jobs: Jobs, resume: str) -> int:
    """Train the BF16 run of the first seed unless a run is given, measure it, and print the findings."""
    recipes = [
        run.config.recipe for run in matrix.runs if run.seed == matrix.seeds[0] and run.recipe != BASELINE
    ]
    _require_recipes(args, recipes)
    run = Path(args.from_run) if args.from_run else _trained(matrix, jobs, resume)
    device = probe(None if (asked := matrix.runs[0].config.train.device) == "auto" else asked)
    on_gpu = device.kind in ("cuda", "rocm")
    tokens = args.measure_tokens or (GPU_TOKENS if on_gpu else None)
    matrix.out.mkdir(parents=True, exist_ok=True)
    records: dict[str, Any] = {}
    tables: list[SideTable] = []
    written: list[Path] = []
    with opened(run, "cuda" if on_gpu else device.kind, tokens) as checkpoint:
        if args.proxies:
            proxies = measure_proxies(checkpoint, recipes)
            records["proxies"] = to_dict(proxies)
            tables.append(proxies_table(proxies))
            written.append(matrix.out / PROXIES_JSON)
            write_json(written[-1], records["proxies"])
        if args.sensitivity:
            (recipe,) = recipes
            found = measure_sensitivity(checkpoint, recipe, args.keep_flops)
            records["sensitivity"] = to_dict(found)
            tables += [layers_table(found), choices_table(found)]
            written.append(matrix.out / SENSITIVITY_JSON)
            write_json(written[-1], records["sensitivity"])
            written.append(write_recipe(found, recipe, matrix.out / f"{recipe.name}-sensitive.yaml"))
    if args.json:
        print(json.dumps(records, indent=2))
        return 0
    for table in tables:
        print_side_table(table)
    for path in written:
        print(f"{'recipe' if path.suffix == '.yaml' else 'written'}: {path}")
    return 0


def _require_recipes(args: Namespace, recipes: Sequence[Recipe]) -> None:
    if not recipes:
        raise ValueError(f"--recipes: must name a recipe besides {BASELINE} to measure, got none. Name one.")
    if args.sensitivity and len(recipes) != 1:
        raise ValueError(
            f"--sensitivity: proposes layers for one recipe, so --recipes must name one besides {BASELINE}, "
            f"got {', '.join(recipe.name for recipe in recipes)}. Name one."
        )


def _trained(matrix: RunMatrix, jobs: Jobs, resume: str) -> Path:
    """The finished BF16 run of the first seed."""
    number = next(i for i, run in enumerate(matrix.runs) if run.recipe == BASELINE)
    progress = MatrixProgress(matrix, Console(stderr=True))
    progress.skip_runs(len(matrix.runs) - 1)
    execute_runs(matrix, progress, resume, replace(jobs, parallel=1), [[number]])
    return matrix.runs[number].folder


def proxies_table(found: Proxies) -> SideTable:
    """A row per recipe."""
    return SideTable(
        title=f"On step {found.step} of {found.run}, every block quantized",
        columns=("recipe", "loss increase", "divergence", "gradient SNR (dB)", "bias", "cosine"),
        rows=tuple(
            (
                row.recipe,
                _increase(row.forward),
                f"{row.forward.divergence:.5f}",
                f"{row.gradient.snr_db:.2f}",
                f"{row.gradient.bias:.4f}",
                f"{row.gradient.cosine:.4f}",
            )
            for row in found.rows
        ),
        note=f"loss increase and divergence of predictions from bf16 by the forward, nats per token, over "
        f"{found.tokens:,} validation tokens (bf16's loss: {found.loss:.4f}); gradient of all quantized "
        f"weights over {found.gradient_tokens:,} tokens",
    )


def layers_table(found: Sensitivity) -> SideTable:
    """A row per layer, the most sensitive first."""
    return SideTable(
        title=f"What {found.recipe} costs in each layer, the rest in bf16 (step {found.step} of {found.run})",
        columns=(
            *("layer", "FLOPs", "divergence", "loss increase", "dX SNR (dB)", "bias", "cosine"),
            *("dW SNR (dB)", "bias", "cosine"),
        ),
        rows=tuple(
            (
                row.layer,
                percent(row.share_of_flops),
                f"{row.fprop.divergence:.6f}",
                _increase(row.fprop),
                *(
                    text
                    for each in (row.dgrad, row.wgrad)
                    for text in (f"{each.snr_db:.1f}", f"{each.bias:.3f}", f"{each.cosine:.4f}")
                ),
            )
            for row in found.layers
        ),
        note=f"ranked by the divergence of predictions from bf16 that Fprop alone causes, nats per token, "
        f"over {found.tokens:,} validation tokens; dX: Dgrad alone; dW: Wgrad alone",
    )


def choices_table(found: Sensitivity) -> SideTable:
    """The cost that remains with no layer in BF16, with the proposal, and with whole blocks."""
    rows = (
        ("nothing", found.nothing),
        ("proposed layers", found.proposal),
        (f"blocks, as in {found.recipe}", found.blocks),
    )
    return SideTable(
        title=f"Kept in bf16 within {percent(found.budget)} of the FLOPs of linear layers",
        columns=("in bf16", "layers", "FLOPs", "divergence", "vs nothing", "loss increase"),
        rows=tuple((name, *_choice(each, found.nothing)) for name, each in rows),
        note="of the forward with all other layers quantized; proposed: those whose divergences add up to "
        "the most",
    )


def _choice(choice: Choice, nothing: Choice) -> tuple[str, ...]:
    whole, own = nothing.cost.divergence, choice.cost.divergence
    return (
        str(len(choice.layers)),
        percent(choice.share_of_flops),
        f"{own:.5f}",
        DASH if choice is nothing or not whole else f"{signed(100 * (own / whole - 1), 0)} %",
        _increase(choice.cost),
    )


def _increase(cost: Cost) -> str:
    return signed(cost.loss_increase, 5, cost.loss_margin)
