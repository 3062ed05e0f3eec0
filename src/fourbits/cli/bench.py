"""Measure the speed of quantizers, a linear, a training step or the data, with ratios from the same run."""

import json
from argparse import ArgumentParser, Namespace

import torch
from rich.console import Console
from rich.table import Table

from fourbits.bench.data import bench_data
from fourbits.bench.linear import bench_linear
from fourbits.bench.quantize import bench_quantize
from fourbits.bench.quantize_recipe import bench_recipe
from fourbits.bench.step import bench_step
from fourbits.bench.timing import Report

EXAMPLE = "fourbits bench linear --json"
BENCHMARKS = {"quantize": bench_quantize, "linear": bench_linear, "step": bench_step, "data": bench_data}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("what", choices=BENCHMARKS, help="what to measure")
    parser.add_argument(
        "--recipe", metavar="NAME", help="with quantize: what the options of this recipe cost, by operand"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: Namespace) -> int:
    """Measure and print. Raises ValueError for a device that is not here and for an unknown recipe."""
    if args.recipe and args.what != "quantize":
        raise ValueError(f"--recipe {args.recipe}: is an option of quantize, got {args.what}. Leave it out.")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: torch sees no CUDA device. Use --device cpu, or see fourbits doctor."
        )
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind)
    report = bench_recipe(device, args.recipe) if args.recipe else BENCHMARKS[args.what](device)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        Console().print(_table(report))
    return 0


def _table(report: Report) -> Table:
    facts = f"{report.device}, torch {report.torch}; copy {report.copy_bandwidth / 1e9:,.1f} GB/s, "
    title = f"{report.benchmark}: {facts}BF16 product {report.product_rate / 1e12:,.2f} TFLOP/s"
    table = Table("what", "median ms", "value", "goal", "ceiling", title=title, title_justify="left")
    for bar in report.bars:
        goal, ceiling = (f"{x:.2f}" if x is not None else "" for x in (bar.goal, bar.ceiling))
        table.add_row(bar.name, f"{bar.seconds * 1e3:,.3f}", f"{bar.value:.2f} {bar.unit}", goal, ceiling)
    return table
