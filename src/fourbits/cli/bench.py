"""Measure the speed of quantizers, linear layers, experts, the SSD scan, training, generation, or data.

Both sides of a ratio are measured in the same run. `fourbits bench WHAT --help` describes each benchmark.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from fourbits.bench.calibrate import calibrate
from fourbits.bench.data import bench_data
from fourbits.bench.experts import bench_experts
from fourbits.bench.generate import GenerateRequest, bench_generate
from fourbits.bench.hf import MODES, SIZES, bench_hf
from fourbits.bench.linear import bench_linear
from fourbits.bench.peers.model import PEERS
from fourbits.bench.quantize import bench_quantize
from fourbits.bench.quantize_recipe import bench_recipe
from fourbits.bench.ranks.measure import RanksMeasurements, RanksRequest, bench_ranks
from fourbits.bench.ssd import bench_ssd
from fourbits.bench.steps.model import RECIPES, ModelMeasurements, ModelRequest, bench_model
from fourbits.bench.steps.step import bench_step
from fourbits.bench.sums import bench_sums
from fourbits.bench.timing import Measurements
from fourbits.cli.bench_tables import model_tables, ranks_table, result_table
from fourbits.cli.output_file import require_output
from fourbits.cli.parser import add_action
from fourbits.compare.terminal import print_table
from fourbits.plan.calibration import how_to_use, to_json
from fourbits.train.parallel import ParallelConfig
from fourbits.train.ranks.join import joined
from fourbits.train.ranks.launcher import launched_rank

EXAMPLE = "fourbits bench linear --json"
#: the benchmarks that torchrun may start
RANKS, CALIBRATE = "ranks", "calibrate"


Request = TypeVar("Request", ModelRequest, RanksRequest, GenerateRequest)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark: its summary, an example, its function (None: runs on ranks), and its options."""

    summary: str
    example: str
    measure: Callable[[torch.device, Namespace], Measurements] | None
    add_options: Callable[[ArgumentParser], None] = lambda parser: None


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the benchmarks, each with its options."""
    actions = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, benchmark in BENCHMARKS.items():
        own = add_action(actions, name, benchmark.summary, benchmark.example)
        benchmark.add_options(own)
        own.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if present, else cpu")
        own.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: Namespace) -> int:
    """Measure and print. Raises ValueError for a missing device and for unknown names or sizes."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: torch finds no CUDA device. Use --device cpu, or run `fourbits doctor`."
        )
    if args.what == CALIBRATE:
        return _calibrate(args)
    if args.what == RANKS:
        request = _request(RanksRequest, args)
        with joined(request.config().parallel, args.device) as ranks:
            log = _print_progress if ranks.is_first else lambda line: None
            measured = bench_ranks(ranks, request, log)
            return _show(measured, args) if ranks.is_first else 0
    if (where := launched_rank()) is not None and where.world > 1:
        raise ValueError(
            f"bench {args.what}: runs in one process, but torchrun started {where.world}. Use torchrun for "
            f"fourbits bench {RANKS} and {CALIBRATE} only."
        )
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    measure = BENCHMARKS[args.what].measure
    assert measure is not None, "benchmarks of ranks have returned"
    return _show(measure(device, args), args)


def _calibrate(args: Namespace) -> int:
    """Measure the rates of this machine, and print or write them."""
    if args.out is not None:
        require_output("--out", args.out, "rates.json")
    with joined(ParallelConfig(), args.device) as ranks:
        found = calibrate(ranks, _print_progress if ranks.is_first else lambda line: None)
        if ranks.is_first and args.out is not None:
            args.out.write_text(to_json(found), encoding="utf-8")
            print(how_to_use(found, args.out))
        elif ranks.is_first:
            print(to_json(found), end="")
    return 0


def _show(measured: Measurements, args: Namespace) -> int:
    if args.json:
        print(json.dumps(measured.to_dict(), indent=2))
        return 0
    print_table(result_table(measured))
    for table in model_tables(measured) if isinstance(measured, ModelMeasurements) else ():
        print_table(table)
    if isinstance(measured, RanksMeasurements):
        print_table(ranks_table(measured))
    return 0


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _add_recipe(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--recipe", metavar="NAME", help="measure the cost of this recipe's options, per operand"
    )


def _add_ssd(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--preset", metavar="CONFIG", help="measure only the shape of this run preset or file"
    )
    parser.add_argument("--no-compiled", action="store_true", help="skip compiled torch")


def _add_model(parser: ArgumentParser) -> None:
    add = parser.add_argument
    text = "a run preset or YAML file, such as transformer-1.2b"
    add("--preset", required=True, metavar="CONFIG", help=text)
    names = f"default: {' '.join(RECIPES)} (packed: inputs saved for backward as packed codes)"
    add("--recipes", nargs="*", metavar="R", help=names)
    for option, text in (
        ("--seq-len", "tokens per sequence; default: the preset's"),
        ("--micro-batch", "sequences per micro-batch; default: the preset's"),
        ("--accumulation", "micro-batches per step; default: the preset's, at most 2"),
        ("--repeats", "timed steps; default: 5"),
    ):
        add(option, type=int, metavar="N", help=text)
    text = "like train.compile; default: the preset's"
    add("--compile", choices=("none", "regions", "model"), help=text)
    text = f"other implementations to measure: {', '.join(PEERS)}"
    add("--peers", nargs="+", choices=PEERS, metavar="P", help=text)
    add("--no-profile", dest="profile", action="store_false", help="skip the profile")


def _add_ranks(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--preset", required=True, metavar="CONFIG", help="a run preset or YAML file")
    add("--recipes", nargs="+", metavar="R", help="default: bf16 nvfp4")
    for option, text in (
        ("--seq-len", "tokens per sequence; default: the preset's"),
        ("--micro-batch", "sequences per micro-batch; default: the preset's"),
        ("--accumulation", "micro-batches per rank and step; default: the preset's, at most 2"),
        ("--tensor", "ranks that share layers, like parallel.tensor; default: the preset's"),
        ("--repeats", "timed steps; default: 5"),
    ):
        add(option, type=int, metavar="N", help=text)
    text = "like train.compile; default: the preset's"
    add("--compile", choices=("none", "regions", "model"), help=text)
    for name, choices in (
        ("gradients", ("fp32", "bf16")),
        ("gather", ("packed", "masters")),
        ("reshard", ("pass", "step")),
    ):
        add(f"--{name}", choices=choices, help=f"like parallel.{name}; default: the preset's")


def _add_calibrate(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the rates to a file")


def _add_hf(parser: ArgumentParser) -> None:
    for option, names in (("sizes", tuple(SIZES)), ("modes", MODES)):
        text = f"{option} to measure, of {', '.join(names)}; default: those for the device"
        parser.add_argument(f"--{option}", nargs="+", metavar=option[0].upper(), help=text)


def _add_generate(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--preset", metavar="NAME", help="a model preset; default: hybrid-1.2b on a GPU, else tiny")
    for option, text in (
        ("--batch", "sequences; default: 64 on a GPU, else 4"),
        ("--prompt", "tokens of each prompt; default: 512 on a GPU, else 64"),
        ("--tokens", "new tokens of each; default: 128 on a GPU, else 8"),
    ):
        add(option, type=int, metavar="N", help=text)
    add("--no-peer", dest="peer", action="store_false", help="skip transformers")


def _request(kind: type[Request], args: Namespace) -> Request:
    """The request that the options describe; options that are not given keep the request's defaults."""
    names = [field.name for field in fields(kind)]
    given: dict[str, Any] = {
        name: value for name in names if (value := getattr(args, name, None)) is not None
    }
    given |= {name: tuple(given[name]) for name in ("recipes", "peers") if name in given}
    return kind(**given)


BENCHMARKS = {
    "quantize": Benchmark(
        "measure quantizers, packed and dequantized, against copying the same bytes",
        "fourbits bench quantize --recipe nvfp4-46",
        lambda device, args: bench_recipe(device, args.recipe) if args.recipe else bench_quantize(device),
        _add_recipe,
    ),
    "linear": Benchmark(
        "measure one linear layer, forward and backward, by recipe",
        EXAMPLE,
        lambda device, args: bench_linear(device),
    ),
    "experts": Benchmark(
        "measure a layer of experts by grouped launches, against a grouped GEMM in BF16",
        "fourbits bench experts",
        lambda device, args: bench_experts(device),
    ),
    "sums": Benchmark(
        "measure GEMMs with the sums of an FP4 tensor core, on normal and on recorded operands, against BF16",
        "fourbits bench sums",
        lambda device, args: bench_sums(device),
    ),
    "ssd": Benchmark(
        "measure the SSD scan of Mamba-2, its convolution and its norm, against compiled torch",
        "fourbits bench ssd --preset tiny --no-compiled",
        lambda device, args: bench_ssd(device, _print_progress, args.preset, compiled=not args.no_compiled),
        _add_ssd,
    ),
    "step": Benchmark(
        "measure training steps of small models, by recipe",
        "fourbits bench step",
        lambda device, args: bench_step(device),
    ),
    "model": Benchmark(
        "measure training steps of a preset per recipe: tokens/s, MFU by type of layer, memory; "
        "also other implementations",
        "fourbits bench model --preset transformer-1.2b --recipes bf16 nvfp4",
        lambda device, args: bench_model(device, _request(ModelRequest, args), _print_progress),
        _add_model,
    ),
    RANKS: Benchmark(
        "under torchrun, measure training steps of several ranks against one: speed, memory, bytes sent",
        "fourbits bench ranks --preset transformer-1.2b --recipes bf16 nvfp4",
        None,
        _add_ranks,
    ),
    CALIBRATE: Benchmark(
        "measure the rates of this machine for `fourbits plan --calibration`; under torchrun its links, too",
        "fourbits bench calibrate --out h200.json",
        None,
        _add_calibrate,
    ),
    "hf": Benchmark(
        "measure steps of transformers' Llama in a custom training loop: eager, compiled, with CUDA graphs",
        "fourbits bench hf --modes eager",
        lambda device, args: bench_hf(device, _print_progress, args.sizes, args.modes),
        _add_hf,
    ),
    "generate": Benchmark(
        "measure generation in batches: prefill, a step, whole texts; against transformers' generate",
        "fourbits bench generate --tokens 128",
        lambda device, args: bench_generate(device, _request(GenerateRequest, args), _print_progress),
        _add_generate,
    ),
    "data": Benchmark(
        "measure preparing and reading tokens",
        "fourbits bench data",
        lambda device, args: bench_data(device),
    ),
}
