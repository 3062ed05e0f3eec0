"""Measure the speed of quantizers, a linear layer, experts, the SSD scan, a training step, a model, or the
data.

Both sides of a ratio are measured in the same run. `model` measures training steps of a preset per recipe:
tokens/s, MFU in total and by type of layer, memory, and the throughput of the Hugging Face implementation at
the same shapes (--peers). `hf` measures steps of transformers' Llama as a user's own loop runs them: eager,
and under torch.compile without and with CUDA graphs.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

import torch
from rich.console import Console

from fourbits.bench.data import bench_data
from fourbits.bench.experts import bench_experts
from fourbits.bench.hf import MODES, SIZES, bench_hf
from fourbits.bench.linear import bench_linear
from fourbits.bench.peers.model import PEERS
from fourbits.bench.quantize import bench_quantize
from fourbits.bench.quantize_recipe import bench_recipe
from fourbits.bench.ssd import bench_ssd
from fourbits.bench.steps.model import RECIPES, ModelMeasurements, ModelRequest, bench_model
from fourbits.bench.steps.step import bench_step
from fourbits.cli.bench_tables import model_tables, result_table

EXAMPLE = "fourbits bench linear --json"
BENCHMARKS = {
    "quantize": bench_quantize,
    "linear": bench_linear,
    "experts": bench_experts,
    "step": bench_step,
    "data": bench_data,
}

_SIZES = ("seq_len", "micro_batch", "accumulation")
# Options that only `hf` has, and those that only `model` has, except that `ssd` has --preset too.
_HF_OPTIONS = ("sizes", "modes")
_MODEL_OPTIONS = ("preset", "recipes", *_SIZES, "compile", "repeats", "peers", "no_profile")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("what", choices=(*BENCHMARKS, "ssd", "model", "hf"), help="what to measure")
    parser.add_argument(
        "--recipe", metavar="NAME", help="with quantize: the cost of this recipe's options, per operand"
    )
    parser.add_argument("--no-compiled", action="store_true", help="with ssd: skip compiled torch")
    text = "with model: a run preset or YAML file, e.g. transformer-1.2b; with ssd: measure only its shape"
    parser.add_argument("--preset", metavar="CONFIG", help=text)
    _add_model_arguments(parser)
    _add_hf_arguments(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if present, else cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_model_arguments(parser: ArgumentParser) -> None:
    model = parser.add_argument_group("with model")
    names = f"default: {' '.join(RECIPES)} (packed: inputs saved for backward as packed codes)"
    model.add_argument("--recipes", nargs="*", metavar="R", help=names)
    for option, text in (
        ("--seq-len", "tokens per sequence; default: the preset's"),
        ("--micro-batch", "sequences per micro-batch; default: the preset's"),
        ("--accumulation", "micro-batches per step; default: the preset's, at most 2"),
        ("--repeats", "timed steps; default: 5"),
    ):
        model.add_argument(option, type=int, metavar="N", help=text)
    text = "like train.compile; default: the preset's"
    model.add_argument("--compile", choices=("none", "regions", "model"), help=text)
    model.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        metavar="P",
        help=f"other implementations to measure: {', '.join(PEERS)}",
    )
    model.add_argument("--no-profile", action="store_true", default=None, help="skip the profile")


def _add_hf_arguments(parser: ArgumentParser) -> None:
    hf = parser.add_argument_group("with hf")
    for option, names in (("sizes", tuple(SIZES)), ("modes", MODES)):
        text = f"{option} to measure, of {', '.join(names)}; default: those for the device"
        hf.add_argument(f"--{option}", nargs="+", metavar=option[0].upper(), help=text)


def run(args: Namespace) -> int:
    """Measure and print. Raises ValueError for a missing device and for unknown names or sizes."""
    _check_options(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: torch finds no CUDA device. Use --device cpu, or run `fourbits doctor`."
        )
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.what == "model":
        measured = bench_model(device, _request(args), _print_progress)
    elif args.what == "hf":
        measured = bench_hf(device, _print_progress, args.sizes, args.modes)
    elif args.what == "ssd":
        measured = bench_ssd(device, _print_progress, args.preset, compiled=not args.no_compiled)
    else:
        measured = bench_recipe(device, args.recipe) if args.recipe else BENCHMARKS[args.what](device)
    if args.json:
        print(json.dumps(measured.to_dict(), indent=2))
        return 0
    console = Console()
    console.print(result_table(measured))
    for table in model_tables(measured) if isinstance(measured, ModelMeasurements) else ():
        console.print(table)
    return 0


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_options(args: Namespace) -> None:
    """Raises ValueError for an option of another benchmark, and for `model` without --preset."""
    if args.recipe and args.what != "quantize":
        raise ValueError(f"--recipe: only valid with quantize, got {args.what}. Remove the option.")
    if args.no_compiled and args.what != "ssd":
        raise ValueError(f"--no-compiled: only valid with ssd, got {args.what}. Remove the option.")
    for name in _HF_OPTIONS:
        if getattr(args, name) is not None and args.what != "hf":
            raise ValueError(f"--{name}: only valid with hf, got {args.what}. Remove the option.")
    if args.what == "model":
        if not args.preset:
            raise ValueError("model needs --preset. Add one, such as --preset transformer-1.2b.")
        return
    for name in _MODEL_OPTIONS:
        if getattr(args, name) is not None and (args.what, name) != ("ssd", "preset"):
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option}: only valid with model, got {args.what}. Remove the option.")


def _request(args: Namespace) -> ModelRequest:
    """The request that the options describe; options that were not given keep the request's defaults."""
    given: dict[str, Any] = {
        name: value for name in _MODEL_OPTIONS if (value := getattr(args, name)) is not None
    }
    given["profile"] = not given.pop("no_profile", False)
    given |= {name: tuple(given[name]) for name in ("recipes", "peers") if name in given}
    return ModelRequest(**given)
