"""Find common mistakes in a configuration before training, each with its reason and its remedy.

CONFIG is a preset or a YAML file; settings change it, as in `fourbits train`. Exit code 1 if anything was
found. docs/lint.md lists the rules.
"""

import json
from argparse import ArgumentParser, Namespace

from fourbits.lint.lint import lint
from fourbits.train.config import load_config
from fourbits.train.presets import RUN_PRESETS

EXAMPLE = "fourbits lint hybrid-1.2b --recipe nvfp4 --gpus 64"
OVERRIDES = True


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("config", metavar="CONFIG", help="a preset or a .yaml file")
    parser.add_argument("--recipe", metavar="NAME", help="a shipped recipe or a .yaml file")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="number of GPUs of the run (default: --tensor, else 1)"
    )
    parser.add_argument(
        "--tensor", type=int, default=1, metavar="N", help="check shards for N ranks of tensor parallelism"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: Namespace) -> int:
    """Print the findings. 1 if there are any."""
    overrides = {**args.overrides, **({"recipe": args.recipe} if args.recipe else {})}
    config = load_config(args.config, RUN_PRESETS, overrides)
    found = lint(config, args.gpus, args.tensor)
    if args.json:
        print(json.dumps([finding._asdict() for finding in found], indent=2))
    else:
        for finding in found:
            print(f"{finding.rule}: {finding.what}\n  {finding.why}\n  {finding.remedy}")
        print(
            f"{args.config} with {config.recipe.name}: {len(found) or 'no'} finding{'s' * (len(found) != 1)}"
        )
    return 1 if found else 0
