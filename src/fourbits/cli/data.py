"""Turn text into token files, and look into them.

PATH is a .txt, .md, .py or .jsonl file (field "text"), a folder of such files, NAME=PATH to name the source
yourself, a folder that corpus wrote, or the word stdlib for the standard library of this Python.
"""

import json
from argparse import ArgumentParser, Namespace
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from fourbits.data.config import STDLIB, text_sources
from fourbits.data.corpus_folder import write_corpus
from fourbits.data.dataset import PreparedData
from fourbits.data.prepare import PrepareOptions, prepare

EXAMPLE = "fourbits data prepare stdlib --out stdlib-tokens"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="prepare|inspect|corpus")
    making = actions.add_parser("prepare", help="text to token files", allow_abbrev=False)
    making.add_argument("paths", nargs="+", metavar="PATH", help="text to read")
    making.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    making.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json to use instead of training one")
    making.add_argument("--end-token", metavar="TOKEN", help="its end-of-document token, if not a usual one")
    making.add_argument(
        "--vocab-size", type=int, default=2048, metavar="N", help="size to train (default 2048)"
    )
    making.add_argument(
        "--validation-fraction", type=float, default=0.05, metavar="F", help="share held out (default 0.05)"
    )
    making.add_argument("--seed", type=int, default=0, help="seed of the validation split (default 0)")
    looking = actions.add_parser("inspect", help="say what a prepared folder holds", allow_abbrev=False)
    looking.add_argument("folder", metavar="DIR", help="a folder that prepare wrote")
    looking.add_argument("--verify", action="store_true", help="hash every file whole")
    building = actions.add_parser(
        "corpus", help="write a corpus as text, to read or copy", allow_abbrev=False
    )
    building.add_argument("name", choices=[STDLIB], help="which corpus")
    building.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    for action in (making, looking, building):
        action.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: Namespace) -> int:
    """Do what was asked and print what came of it."""
    if args.action == "corpus":
        return build_corpus(args)
    if args.action == "prepare":
        options = PrepareOptions(
            tokenizer=args.tokenizer,
            end_token=args.end_token,
            vocab_size=args.vocab_size,
            validation_fraction=args.validation_fraction,
            seed=args.seed,
        )
        with ProgressReport() as progress:
            data = prepare(text_sources(args.paths), args.out, options, progress)
    else:
        data = PreparedData.open(args.folder, verify=args.verify)
    if args.json:
        print(json.dumps({"folder": str(data.folder), **data.manifest}, indent=2))
    else:
        show(data)
    return 0


def build_corpus(args: Namespace) -> int:
    """Write the corpus that was named."""
    corpus = write_corpus(text_sources([args.name]), args.out)
    if args.json:
        print(json.dumps({"folder": args.out, **corpus}, indent=2))
    else:
        for name, record in corpus["sources"].items():
            print(f"{name}: {record['documents']:,} documents, {record['bytes'] / 1e6:.2f} MB")
        print(f"next: fourbits data prepare {args.out} --out TOKENS")
    return 0


def show(data: PreparedData) -> None:
    """Print the sources and the tokenizer."""
    table = Table(title=str(data.folder), title_justify="left")
    for column in (
        "source",
        "documents",
        "text MB",
        "train ids",
        "validation ids",
        "bytes per id",
        "licence",
    ):
        table.add_column(column, justify="left" if column in ("source", "licence") else "right")
    for name, record in data.manifest["sources"].items():
        table.add_row(name, *_numbers(record), record["licence"] or "unknown")
    console = Console()
    console.print(table)
    tokenizer = data.tokenizer
    console.print(
        f"tokenizer: {tokenizer.size} ids (model: {tokenizer.vocab_size}), sha256 {tokenizer.sha256[:16]}, "
        f"{tokenizer.end_token!r} ends a document",
        markup=False,
    )


def _numbers(record: dict[str, Any]) -> list[str]:
    ids = record["train"]["tokens"], record["validation"]["tokens"]
    return [
        f"{record['documents']:,}",
        f"{record['text_bytes'] / 1e6:,.2f}",
        *(f"{count:,}" for count in ids),
        f"{record['text_bytes'] / sum(ids):.2f}",
    ]


class ProgressReport:
    """A progress bar on a terminal; one line per finished part where output is piped. Goes to stderr."""

    def __init__(self) -> None:
        """Draw nothing yet."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._console = Console(stderr=True)
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """Start drawing."""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing."""
        self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Bytes done and in all of one part: the tokenizer, or a source."""
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done)
        if done >= total and not self._console.is_terminal:
            self._console.print(f"{what}: {total / 1e6:.1f} MB", markup=False, highlight=False)
