"""Measure the speed of quantizers, a linear, the scan, a training step, a model at its size or the data.

Ratios are from the same run. `model` measures whole steps of a preset by recipe: tokens/s, utilization (MFU)
in all and by type of layer, memory, and what transformers' own class makes of the same shapes (--peers).
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

import torch
from rich.console import Console

from fourbits.bench.data import bench_data
from fourbits.bench.linear import bench_linear
from fourbits.bench.model import RECIPES, ModelReport, ModelRequest, bench_model
from fourbits.bench.model_peers import PEERS
from fourbits.bench.quantize import bench_quantize
from fourbits.bench.quantize_recipe import bench_recipe
from fourbits.bench.ssd import bench_ssd
from fourbits.bench.step import bench_step
from fourbits.cli.bench_tables import bar_table, model_tables

EXAMPLE = "fourbits bench linear --json"
BENCHMARKS = {
    "quantize": bench_quantize,
    "linear": bench_linear,
    "step": bench_step,
    "data": bench_data,
}

_SIZES = ("seq_len", "micro_batch", "accumulation")
_OF_MODEL = ("preset", "recipes", *_SIZES, "compile", "repeats", "peers", "no_profile")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("what", choices=(*BENCHMARKS, "ssd", "model"), help="what to measure")
    parser.add_argument(
        "--recipe", metavar="NAME", help="with quantize: what the options of this recipe cost, by operand"
    )
    parser.add_argument("--no-compiled", action="store_true", help="with ssd: leave out compiled torch")
    what = "with model: a run preset or YAML file, e.g. transformer-1.2b; with ssd: only this shape"
    parser.add_argument("--preset", metavar="CONFIG", help=what)
    model = parser.add_argument_group("with model")
    names = f"default: {' '.join(RECIPES)} (packed: saved inputs in codes)"
    model.add_argument("--recipes", nargs="*", metavar="R", help=names)
    for option, what in (
        ("--seq-len", "tokens of a sequence; default: the preset's"),
        ("--micro-batch", "sequences of a micro-batch; default: the preset's"),
        ("--accumulation", "micro-batches of a step; default: the preset's, at most 2"),
        ("--repeats", "steps that are timed; default: 5"),
    ):
        model.add_argument(option, type=int, metavar="N", help=what)
    what = "as train.compile; default: the preset's"
    model.add_argument("--compile", choices=("none", "regions", "model"), help=what)
    model.add_argument("--peers", nargs="+", choices=PEERS, metavar="P", help=f"of {', '.join(PEERS)}")
    model.add_argument("--no-profile", action="store_true", default=None, help="leave the profile out")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: Namespace) -> int:
    """Measure and print. Raises ValueError for a device that is not here and for unknown names or sizes."""
    _refuse_options_of_others(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: torch sees no CUDA device. Use --device cpu, or see fourbits doctor."
        )
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.what == "model":
        report = bench_model(device, _request(args), _say)
    elif args.what == "ssd":
        report = bench_ssd(device, _say, args.preset, compiled=not args.no_compiled)
    else:
        report = bench_recipe(device, args.recipe) if args.recipe else BENCHMARKS[args.what](device)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
        return 0
    console = Console()
    console.print(bar_table(report))
    for table in model_tables(report) if isinstance(report, ModelReport) else ():
        console.print(table)
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _refuse_options_of_others(args: Namespace) -> None:
    """Raises ValueError for an option that another benchmark has, and for a model without --preset."""
    if args.recipe and args.what != "quantize":
        raise ValueError(f"--recipe {args.recipe}: is an option of quantize, got {args.what}. Leave it out.")
    if args.no_compiled and args.what != "ssd":
        raise ValueError(f"--no-compiled: is an option of ssd, got {args.what}. Leave it out.")
    if args.what == "model":
        if not args.preset:
            raise ValueError("bench model: needs --preset, as in --preset transformer-1.2b.")
        return
    for name in _OF_MODEL:
        if getattr(args, name) is not None and (args.what, name) != ("ssd", "preset"):
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option}: is an option of model, got {args.what}. Leave it out.")


def _request(args: Namespace) -> ModelRequest:
    """What the options ask; those that are not given are the request's own defaults."""
    asked: dict[str, Any] = {name: value for name in _OF_MODEL if (value := getattr(args, name)) is not None}
    asked["profile"] = not asked.pop("no_profile", False)
    asked |= {name: tuple(asked[name]) for name in ("recipes", "peers") if name in asked}
    return ModelRequest(**asked)
