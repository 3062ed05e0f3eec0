"""Plan a run on a cluster before you pay for it: memory, layout, time, energy, cost, checkpoints.

CONFIG is a preset or a YAML file; settings change it, as in `fourbits train`. Every figure is predicted, from
data sheets and declared efficiencies; docs/plan.md shows how far such predictions were from measurements.
"""

import json
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from fourbits.cli.output_file import require_output
from fourbits.cli.plan_tables import published_table, road_table, shown, simulation
from fourbits.compare.report.plan_page import plan_page
from fourbits.compare.report.plan_tables import plan_tables
from fourbits.compare.terminal import print_table
from fourbits.plan.calibration import calibrated, gpu_of, load_calibration
from fourbits.plan.estimate import Plan, Prices, plan_run
from fourbits.plan.gpus import GPUS, MAX_GPUS, Gpu, find_gpu
from fourbits.plan.grid import grid
from fourbits.plan.plain import plain_plan
from fourbits.plan.published import CASES, predict
from fourbits.plan.rates import DECLARED, Rates
from fourbits.plan.road import ROAD
from fourbits.train.config import RunConfig, load_config
from fourbits.train.presets import RUN_PRESETS

EXAMPLE = "fourbits plan hybrid-12b --gpu gb200 --gpus 736 --price 4"
OVERRIDES = True
#: prices beyond it are taken for a mistake
_MAX_PRICE = 1_000_000


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("config", metavar="CONFIG", nargs="?", help="a preset or a .yaml file")
    add("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)}")
    add("--gpus", type=_gpus, metavar="N", help="number of GPUs (default: 1)")
    add("--recipe", metavar="NAME", help="a shipped recipe or a .yaml file")
    add("--price", type=_price, metavar="P", help="price of a GPU hour, in any currency")
    add("--power-price", type=_price, metavar="P", help="price of a kWh, if paid separately")
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="rates of this GPU, measured by `fourbits bench calibrate`",
    )
    add("--simulate", action="store_true", help="also simulate the run, with failures and slow GPUs")
    add(
        "--road", action="store_true", help="plan the stages on the road to the 12B run (docs/road-to-12b.md)"
    )
    add("--published", action="store_true", help="show predictions beside published and measured figures")
    add("--html", type=Path, metavar="FILE", help="write a page with controls for GPUs, precision and prices")
    add("--json", action="store_true", help="print one JSON object")


def run(args: Namespace) -> int:
    """Print the plan, or with --published predictions beside measurements."""
    _refuse_ignored(args)
    if args.published:
        return _published(args.json, args.calibration)
    if args.road:
        print_table(road_table(ROAD))
        return 0
    if args.config is None or args.gpu is None:
        raise ValueError("plan: needs a CONFIG and --gpu, as in `fourbits plan hybrid-12b --gpu h100`.")
    prices = Prices(gpu_hour=args.price, kwh=args.power_price)
    if args.html is not None:
        return _write_page(args, prices)
    plan = planned(args)
    if args.json:
        print(json.dumps(plain_plan(plan, prices), indent=2))
        return 0
    for table in plan_tables(args.config, plan, prices):
        print_table(shown(table))
        print()
    if args.simulate:
        print_table(simulation(plan))
    return 0


def planned(args: Namespace) -> Plan:
    """The plan that the arguments describe."""
    gpu = find_gpu(args.gpu)
    return plan_run(_config(args), gpu, args.gpus or 1, _rates(args.calibration, gpu))


def _config(args: Namespace) -> RunConfig:
    overrides = {**args.overrides, **({"recipe": args.recipe} if args.recipe else {})}
    return load_config(args.config, RUN_PRESETS, overrides)


def _write_page(args: Namespace, prices: Prices) -> int:
    path: Path = args.html
    require_output("--html", path, "plan.html")
    gpu = find_gpu(args.gpu)
    found = grid(_config(args), gpu, args.gpus or 1, _rates(args.calibration, gpu))
    name = Path(args.config).stem if args.config not in RUN_PRESETS else args.config
    path.write_text(plan_page(name, found, prices), encoding="utf-8")
    print(f"{path}: {len(found.cells)} plans; open it in a browser")
    return 0


def _rates(path: Path | None, gpu: Gpu) -> Rates:
    return DECLARED if path is None else calibrated(load_calibration(path), gpu)


def _published(as_json: bool, calibration: Path | None) -> int:
    """The predictions beside measurements, only of the calibrated GPU if a calibration is given."""
    cases, rates = CASES, DECLARED
    if calibration is not None:
        measured = load_calibration(calibration)
        gpu = gpu_of(measured)
        rates = calibrated(measured, gpu)
        cases = tuple(case for case in CASES if case.gpu == gpu.name)
    found = [predict(case, rates) for case in cases]
    if as_json:
        print(
            json.dumps(
                [
                    {
                        "name": each.case.name,
                        "recipe": each.case.recipe.name,
                        "gpu": each.case.gpu,
                        "predicted": each.tokens_per_second,
                        "measured": each.case.tokens_per_second,
                        "predicted_gib": each.gib,
                        "measured_gib": each.case.gib,
                        "why": each.case.why,
                    }
                    for each in found
                ],
                indent=2,
            )
        )
    else:
        print_table(published_table(found))
    return 0


def _gpus(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_GPUS:
        rule = f"must be a whole number from 1 to {MAX_GPUS:,}"
        raise ArgumentTypeError(f"{rule}, got {text!r}. Pass the GPUs of your cluster, such as 64")
    return int(text)


def _price(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MAX_PRICE:
        rule = f"must be a number from 0 to {_MAX_PRICE:,}"
        raise ArgumentTypeError(f"{rule}, got {text!r}. Pass what you pay, such as 2.5")
    return value


def _refuse_ignored(args: Namespace) -> None:
    """Raises ValueError for options that do not apply to the chosen output."""
    output = next((name for name in ("published", "road", "html") if getattr(args, name)), None)
    if args.json and output is None:
        output = "json"
    ignored = {
        "published": ("config", "gpu", "recipe", "price", "power_price", "road", "html", "simulate"),
        "road": (
            *("config", "gpu", "recipe", "price", "power_price", "html", "simulate", "json", "calibration"),
        ),
        "html": ("simulate", "json"),
        "json": ("simulate",),
    }
    for name in ignored.get(output or "", ()):
        if getattr(args, name) is not None and getattr(args, name) is not False:
            shown = "CONFIG" if name == "config" else f"--{name.replace('_', '-')}"
            raise ValueError(f"plan: --{output} takes no {shown}, got both. Leave one out.")
    if output in ("published", "road"):
        given = next(iter(args.overrides), None) or ("gpus" if args.gpus is not None else None)
        if given is not None:
            raise ValueError(f"plan: --{output} takes no --{given}, got both. Leave one out.")
