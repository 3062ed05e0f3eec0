"""Repeat a published comparison of 4-bit recipes, and print its gaps next to the published ones.

Llamas of 30M to 200M parameters, 512 sequences of 512 tokens per step, all linear layers of blocks in 4 bits:
the settings of Quartet II (arXiv:2601.22813). --tokens chooses one of the published lengths, by default the
shortest, 25 tokens per parameter. The published results are those of C4 (English) with Llama 2's tokenizer;
with other text the order of recipes can be compared, the losses cannot. Rerun the command to resume it.

Settings are options, as in `fourbits compare`: --data.paths C4 (text, or a prepared folder),
--data.tokenizer FILE, and for less memory --train.micro_batch_size 32 --train.gradient_accumulation 16.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fourbits.cli.compare import REPLACED, add_common_arguments, add_seed_arguments, compare_and_print
from fourbits.compare.published import MODELS, find_cell, published_config, published_recipes
from fourbits.compare.run.run_matrix import BASELINE, build_matrix
from fourbits.settings import nearest, to_dict
from fourbits.train.config import config_from_mapping

EXAMPLE = "fourbits protocol 30m --data.paths c4 --data.tokenizer llama2/tokenizer.json --seeds 0 1 2"
OVERRIDES = True


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("model", choices=MODELS, metavar="MODEL", help=f"one of {', '.join(MODELS)}")
    parser.add_argument(
        "--tokens", type=float, metavar="N", help="a published number of tokens (default: the smallest)"
    )
    parser.add_argument(
        "--recipes",
        nargs="+",
        metavar="NAME",
        help=f"{BASELINE} and these of {', '.join(list(published_recipes())[1:])} (default: all)",
    )
    add_seed_arguments(parser)
    parser.add_argument("--out", metavar="DIR", help="output folder (default: runs/protocol-MODEL)")
    add_common_arguments(parser)


def run(args: Namespace) -> int:
    """Compare. 0: done; 129, 130 or 143: stopped by a signal, and the same command resumes."""
    for setting in (*REPLACED, "train.tokens", "train.steps", "model"):
        if given := [key for key in args.overrides if key == setting or key.startswith(f"{setting}.")]:
            raise ValueError(
                f"--{given[0]}: is part of the protocol. Use --recipes, --seeds and --tokens, or for other "
                "settings fourbits compare."
            )
    cell = find_cell(args.model, args.tokens)
    config = config_from_mapping(to_dict(published_config(cell)), args.overrides, f"protocol {cell.model}")
    known = published_recipes()
    for name in args.recipes or ():
        if name not in known:
            raise ValueError(
                f"--recipes: no recipe of the protocol is called {name!r}.{nearest(name, list(known))} "
                f"They are {', '.join(known)}. Compare others with fourbits compare."
            )
    chosen = [recipe for name, recipe in known.items() if name in (BASELINE, *(args.recipes or known))]
    out = Path(args.out or f"runs/protocol-{cell.model}")
    matrix = build_matrix(config, f"protocol-{cell.model}", chosen, args.seeds, out, published=cell)
    args.techniques = False
    return compare_and_print(args, matrix, _words(args, out), _words)


def _words(args: Namespace, out: Path) -> list[str]:
    """The words of the command that runs this comparison, without --jobs."""
    return [
        *("protocol", args.model),
        *(("--tokens", f"{args.tokens:g}") if args.tokens else ()),
        *(("--recipes", *args.recipes) if args.recipes else ()),
        *("--seeds", *map(str, args.seeds)),
        *(("--stop-early",) if args.stop_early else ()),
        *(("--average", str(args.average)) if args.average > 1 else ()),
        *("--out", str(out)),
        *(word for key, value in args.overrides.items() for word in (f"--{key}", value)),
    ]
