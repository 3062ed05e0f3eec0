"""Prepare text as token files, and inspect them.

PATH is a text or source-code file, JSON lines (.jsonl, .ndjson, .json) or .csv, each also as .gz or .zst, or
.parquet; a folder of such files; the .idx of a Megatron token file; hf:NAME[:CONFIG][@SPLIT], a Hub dataset
or a folder that `datasets` can load; a folder written by `fourbits data corpus`; or stdlib, the standard
library of this Python. NAME=PATH names a source.
"""

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self, get_args

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from fourbits.cli.data_inspect import add_inspect, inspect, show_inspection
from fourbits.cli.parser import add_action
from fourbits.compare.terminal import print_table
from fourbits.data.config import STDLIB, text_sources
from fourbits.data.corpora.corpus_folder import write_corpus
from fourbits.data.corpora.debian import build_debian
from fourbits.data.corpora.deduplicate import Rule
from fourbits.data.corpora.document import SkippedFiles, Source
from fourbits.data.corpora.folder import listed
from fourbits.data.corpora.read_files import TEXT_FIELD
from fourbits.data.corpora.sources import ReadOptions
from fourbits.data.prepare.prepare import PrepareOptions, prepare
from fourbits.data.prepare.round_trip import MAX_LOST
from fourbits.data.stream.dataset import PreparedData
from fourbits.settings import nearest

DEBIAN = "debian"
EXAMPLE = "fourbits data prepare stdlib --out stdlib-tokens"
EXAMPLE_INSPECT = "fourbits data inspect stdlib-tokens --run tiny --step 0"
EXAMPLE_CORPUS = "fourbits data corpus stdlib --out stdlib-text"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="prepare|inspect|corpus")
    preparing = add_action(actions, "prepare", "convert text to token files", EXAMPLE)
    _add_prepare(preparing)
    inspecting = add_action(actions, "inspect", "show what a prepared folder contains", EXAMPLE_INSPECT)
    add_inspect(inspecting)
    building = add_action(actions, "corpus", "build a corpus and write it as text", EXAMPLE_CORPUS)
    building.add_argument("name", choices=[STDLIB, DEBIAN], help="which corpus")
    building.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    building.add_argument(
        "--debs", metavar="DIR", help="debian: folder of downloaded packages, instead of apt-get"
    )
    building.add_argument(
        "--max-mb", type=float, metavar="N", help="debian: limit on the text of each source, in MB"
    )
    for action in (preparing, inspecting, building):
        action.add_argument("--json", action="store_true", help="print one JSON object")


def _add_prepare(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="text to read")
    add("--out", required=True, metavar="DIR", help="folder to write")
    add(
        "--tokenizer",
        metavar="NAME",
        help="use this tokenizer instead of training one: a tokenizer.json, a transformers folder or Hub "
        "name, or tekken",
    )
    add("--end-token", metavar="TOKEN", help="end-of-document token of --tokenizer, if not a common one")
    add("--vocab-size", type=int, default=2048, metavar="N", help="vocabulary size to train (default 2048)")
    add(
        "--validation-fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="share of documents held out (default 0.05)",
    )
    add("--seed", type=int, default=0, help="seed of the validation split (default 0)")
    add(
        "--deduplicate",
        choices=get_args(Rule),
        default="none",
        help="drop duplicate documents: identical text (exact), or identical lines ignoring case and spacing "
        "(lines)",
    )
    add(
        "--max-lost",
        type=float,
        default=MAX_LOST,
        metavar="F",
        help="largest share of a source's characters that the tokenizer may lose (default 0.01)",
    )
    _add_reading(parser)


def _add_reading(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--text-field",
        default=TEXT_FIELD,
        metavar="NAME",
        help="field or column that holds the text (default text)",
    )
    add(
        "--allow-skipped",
        action="store_true",
        help="read a folder although most of its bytes are in files of other types, which are skipped",
    )
    add("--follow-links", action="store_true", help="read links to files inside folders")
    add(
        "--license",
        "--licence",
        dest="licence",
        action="append",
        default=[],
        metavar="[SOURCE=]SPDX",
        help="license to record; repeatable",
    )


def run(args: Namespace) -> int:
    """Run the action and print its result."""
    if args.action == "corpus":
        return build_corpus(args)
    if args.action == "inspect":
        return show_folder(args)
    options = PrepareOptions(
        tokenizer=args.tokenizer,
        end_token=args.end_token,
        vocab_size=args.vocab_size,
        validation_fraction=args.validation_fraction,
        seed=args.seed,
        deduplicate=args.deduplicate,
        max_lost=args.max_lost,
    )
    reading = ReadOptions(
        text_field=args.text_field, allow_skipped=args.allow_skipped, follow_links=args.follow_links
    )
    sources = licensed(text_sources(args.paths, reading), args.licence)
    with PartProgress() as progress:
        data = prepare(sources, args.out, options, progress)
    if args.json:
        print(json.dumps({"folder": str(data.folder), **data.manifest}, indent=2))
    else:
        show(data)
    return 0


def show_folder(args: Namespace) -> int:
    """Print what a prepared folder contains, and what a run reads from it."""
    found = inspect(args)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        show(PreparedData.open(found["folder"]))
        show_inspection(found)
    return 0


def licensed(sources: Sequence[Source], arguments: Sequence[str]) -> list[Source]:
    """Set the given licences for one source or for all. Raises ValueError for an unknown source."""
    licences = dict.fromkeys((source.name for source in sources), "")
    for text in arguments:
        name, equals, licence = text.rpartition("=")
        if equals and name not in licences:
            raise ValueError(
                f"--license {text}: no source is called {name!r}.{nearest(name, list(licences))}"
            )
        licences.update(dict.fromkeys([name] if equals else licences, licence))
    return [replace(source, licence=licences[source.name] or source.licence) for source in sources]


def build_corpus(args: Namespace) -> int:
    """Build the corpus of this name, and print its sources."""
    if args.name == STDLIB and (args.debs or args.max_mb is not None):
        raise ValueError(f"--debs and --max-mb apply to {DEBIAN} only. Remove them.")
    if args.name == DEBIAN:
        if args.max_mb is not None and not 0 < args.max_mb < math.inf:
            raise ValueError(f"--max-mb {args.max_mb:g}: must be a number above 0, in MB of text.")
        limit = None if args.max_mb is None else round(args.max_mb * 1e6)
        with PartProgress() as progress:
            corpus = build_debian(args.out, progress, debs=args.debs, max_bytes=limit)
    else:
        corpus = write_corpus(text_sources([args.name]), args.out)
    if args.json:
        print(json.dumps({"folder": args.out, **corpus}, indent=2))
    else:
        for name, record in corpus["sources"].items():
            print(f"{name}: {record['documents']:,} documents, {record['bytes'] / 1e6:.2f} MB of JSON lines")
        if missing := corpus.get("missing_packages"):
            print(f"packages that could not be downloaded, skipped: {', '.join(missing)}", file=sys.stderr)
        print(f"next: fourbits data prepare {args.out} --out TOKENS")
    return 0


def show(data: PreparedData) -> None:
    """Print the sources and the tokenizer."""
    table = Table("source", title=str(data.folder), title_justify="left")
    for column in ("documents", "text MB", "train tokens", "val tokens", "bytes/token"):
        table.add_column(column, justify="right")
    records = data.manifest["sources"]
    for name, record in records.items():
        table.add_row(name, *_numbers(record))
    console = Console()
    print_table(table, console)
    lines = [f"{name}: license {record['licence'] or 'unknown'}" for name, record in records.items()]
    for name, record in records.items():
        if record.get("repeated_documents"):
            lines.append(f"{name}: {record['repeated_documents']:,} duplicate documents dropped")
        lines += [f"{name}: {line}" for line in reading_lines(data.manifest.get("reading", {}).get(name, {}))]
    tokenizer = data.tokenizer
    lines.append(
        f"tokenizer: {tokenizer.size} tokens (model: {tokenizer.vocab_size}), "
        f"sha256 {tokenizer.sha256[:16]}, {tokenizer.end_token!r} ends a document"
    )
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def reading_lines(reading: dict[str, Any]) -> list[str]:
    """Lines about skipped files and text that the tokenizer loses; empty if there are none."""
    lines: list[str] = []
    if skipped := reading.get(
        "skipped_files", reading.get("passed_over")
    ):  # the second name is that of older folders
        lines.append(f"skipped {listed({k: SkippedFiles(**v) for k, v in skipped.items()})}")
    if lost := reading.get("lost_characters"):
        share = lost / reading["sampled_characters"]
        lines.append(f"the tokenizer loses {share:.2%} of the characters, in a sample")
    if dropped := reading.get("unencodable_documents"):
        lines.append(f"{dropped:,} documents without any token dropped")
    return lines


def _numbers(record: dict[str, Any]) -> list[str]:
    tokens = record["train"]["tokens"], record["validation"]["tokens"]
    return [
        f"{record['documents']:,}",
        f"{record['text_bytes'] / 1e6:,.2f}",
        *(f"{count:,}" for count in tokens),
        f"{record['text_bytes'] / sum(tokens):.2f}" if record["text_bytes"] else "",
    ]


class PartProgress:
    """Progress on stderr: a bar on a terminal, or one line per finished part if stderr is redirected.

    It counts bytes of the files on disk, compressed or not; the table at the end has bytes of text.
    """

    def __init__(self) -> None:
        """Set up the bar without drawing it."""
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
        """Report the bytes done and in total (0 if unknown) of one part: the tokenizer, or a source."""
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total or None)
        self._bar.update(self._tasks[what], completed=done)
        if done >= total > 0 and not self._console.is_terminal:
            self._console.print(
                f"{what}: read {total / 1e6:.1f} MB of files", markup=False, highlight=False, soft_wrap=True
            )
