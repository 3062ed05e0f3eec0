"""`fourbits data inspect`: collects what a folder contains and prints it."""

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from fourbits.compare.terminal import print_table
from fourbits.data.config import open_data
from fourbits.data.inspect import duplicate_documents, length_quantiles, phase_reads, sample_locations
from fourbits.data.stream.dataset import PreparedData
from fourbits.data.stream.manifest import MANIFEST
from fourbits.data.stream.stream import PhasedStream
from fourbits.data.whole_file import read_json
from fourbits.train.config import RunConfig, load_config
from fourbits.train.metrics import read_history, read_metrics
from fourbits.train.presets import RUN_PRESETS
from fourbits.train.samples import run_stream


def add_inspect(parser: ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("folder", metavar="DIR", help="a prepared folder, or a run folder, to show what that run reads")
    add("--verify", action="store_true", help="re-hash every file and validate every token")
    add("--duplicates", action="store_true", help="count duplicate documents")
    add(
        "--run",
        metavar="CONFIG",
        help="show what a run reads from this data, by phase: a preset, a YAML file, RUN/config.yaml",
    )
    add("--step", type=int, metavar="N", help="with a run: show where the samples of step N are read")
    add("--sample", type=int, metavar="N", help="with a run: show the text of sample N")
    add("--document", metavar="SOURCE:N", help="show the text of one training document")


def inspect(args: Namespace) -> dict[str, Any]:
    """Collect the requested values."""
    folder = Path(args.folder)
    run = args.run or (str(folder / "config.yaml") if (folder / "config.yaml").is_file() else None)
    config = None if run is None else load_config(run, RUN_PRESETS)
    data = _open(folder, config, args.verify)
    found: dict[str, Any] = {"folder": str(data.folder), **data.manifest}
    found["lengths"] = {
        split: {name: length_quantiles(file) for name, file in files.items()}
        for split, files in (("train", data.train), ("validation", data.validation))
    }
    if args.verify:
        for file in (*data.train.values(), *data.validation.values()):
            file.check_tokens(data.tokenizer.size)
    if args.duplicates:
        duplicates = duplicate_documents(data)
        found["duplicates"] = {k: {n: asdict(d) for n, d in v.items()} for k, v in duplicates.items()}
    if args.document:
        found["document"] = _document(data, args.document)
    if config is not None:
        _add_run(found, data, config, args, folder / "metrics.jsonl")
        found["validation_losses"] = _losses(folder / "metrics.jsonl", list(data.validation))
    elif args.step is not None or args.sample is not None:
        raise ValueError("--step and --sample need a run; pass one with --run CONFIG.")
    return found


def _open(folder: Path, config: RunConfig | None, verify: bool) -> PreparedData:
    manifest = folder / MANIFEST
    if config is not None and (folder / "config.yaml").is_file() and manifest.is_file():
        record = read_json(manifest, "Pass the prepared folder instead.").get("data")
        recorded = record.get("folder") if isinstance(record, dict) else None
        return (
            PreparedData.open(recorded, verify=verify)
            if recorded
            else open_data(config.data, folder / "data")
        )
    return PreparedData.open(folder, verify=verify)


def _add_run(
    found: dict[str, Any], data: PreparedData, config: RunConfig, args: Namespace, metrics: Path
) -> None:
    """metrics: the run's, if it has begun; after a rollback its steps read later samples."""
    train = config.train
    stream = run_stream(config, data)
    found["plan"] = [asdict(phase) for phase in phase_reads(stream, train.samples_per_step)]
    found["rounding"] = stream.rounding()
    if args.step is not None:
        if not 0 <= args.step < train.num_steps:
            raise ValueError(
                f"--step {args.step}: must be in 0 to {train.num_steps - 1}, the steps of the run."
            )
        offset = _data_offset(metrics, args.step)
        stream.read_beyond(offset * train.samples_per_step)
        first = (args.step + offset) * train.samples_per_step
        found["step"] = sample_locations(stream, first, train.samples_per_step)
    if args.sample is not None:
        if not 0 <= args.sample < stream.total_samples:
            raise ValueError(
                f"--sample {args.sample}: must be in 0 to {stream.total_samples - 1}, the samples of the run."
            )
        found["sample"] = {
            **sample_locations(stream, args.sample, 1)[0],
            "text": _text(data, stream, args.sample),
        }


def _text(data: PreparedData, stream: PhasedStream, number: int) -> str:
    """A sample as text, with the end token on a separate line after each document."""
    parts: list[list[int]] = [[]]
    for token in stream.sample(number).tolist():
        if token == data.tokenizer.end_id:
            parts.append([])
        else:
            parts[-1].append(token)
    return f"\n{data.tokenizer.end_token}\n".join(data.tokenizer.decode(part) for part in parts)


def _document(data: PreparedData, argument: str) -> dict[str, Any]:
    name, _, number = argument.rpartition(":")
    if name not in data.train or not (number.isascii() and number.isdigit()):
        raise ValueError(f"--document {argument}: must be SOURCE:N with a source of {', '.join(data.train)}.")
    if int(number) >= data.train[name].num_documents:
        last = data.train[name].num_documents - 1
        raise ValueError(
            f"--document {argument}: must be in 0 to {last}, the training documents of {name!r}."
        )
    tokens = data.train[name].document(int(number)).tolist()
    text = data.tokenizer.decode(tokens)
    return {"source": name, "number": int(number), "tokens": len(tokens), "text": text}


def _data_offset(metrics: Path, step: int) -> int:
    """The number of steps whose data rollbacks have skipped before a step; 0 for the first."""
    records, _, rollbacks = read_history(metrics) if metrics.is_file() else ([], [], [])
    for record in records:
        if (record["kind"], record["step"]) == ("train", step + 1):
            return record.get("data_offset", 0)
    return rollbacks[-1]["data_offset"] if rollbacks else 0


def _losses(path: Path, sources: list[str]) -> list[dict[str, Any]]:
    """The validation losses of a run so far, by source."""
    if not path.is_file():
        return []
    keys = ["step", "val_loss", *(f"val_{name}" for name in sources)]
    records = read_metrics(path)
    return [{key: record.get(key) for key in keys} for record in records if record["kind"] == "validation"]


def show_inspection(found: dict[str, Any]) -> None:
    """Print what `inspect` found, except for the table of sources."""
    print_table(_lengths_table(found["lengths"]["train"]))
    if "duplicates" in found:
        print_table(_duplicates_table(found["duplicates"]))
    if "plan" in found:
        print_table(_phase_table(found["plan"]))
        print(found["rounding"] or "shares match the weights exactly")
    if found.get("validation_losses"):
        rows = found["validation_losses"]
        table = Table(*rows[0], title="validation loss by source", title_justify="left")
        for row in rows:
            table.add_row(
                *(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values())
            )
        print_table(table)
    for row in found.get("step", ()):
        first, last = row["documents"]
        where = f"{row['source']} tokens {row['begin']:,} to {row['end']:,}, documents {first:,} to {last:,}"
        print(f"sample {row['sample']:,}: {where}, epoch {row['epoch']}")
    for kind in ("document", "sample"):
        if kind in found:
            text = found[kind].pop("text")
            print(f"{kind}: {found[kind]}")
            print(text)


def _lengths_table(lengths: dict[str, dict[str, int]]) -> Table:
    table = Table("tokens per document", title="length quantiles", title_justify="left")
    for quantile in next(iter(lengths.values())):
        table.add_column(quantile, justify="right")
    for name, quantiles in lengths.items():
        table.add_row(name, *(f"{count:,}" for count in quantiles.values()))
    return table


def _duplicates_table(duplicates: dict[str, dict[str, dict[str, int]]]) -> Table:
    table = Table("source", "duplicate training documents", "validation documents also in training")
    for name, train in duplicates["train"].items():
        validation = duplicates["validation"][name]
        cells = (f"{part['documents']:,} ({part['tokens']:,} tokens)" for part in (train, validation))
        table.add_row(name, *cells)
    return table


def _phase_table(phases: list[dict[str, Any]]) -> Table:
    table = Table("phase", "steps", "source", title="what the run reads", title_justify="left")
    for column in ("share", "samples", "tokens", "epochs so far"):
        table.add_column(column, justify="right")
    for number, phase in enumerate(phases, start=1):
        for row, (name, source) in enumerate(phase["sources"].items()):
            place = (
                (str(number), f"{phase['first_step']:,} to {phase['end_step']:,}") if row == 0 else ("", "")
            )
            counts = (f"{source['samples']:,}", f"{source['tokens']:,}", f"{source['epochs']:.3f}")
            table.add_row(*place, name, f"{source['share']:.4f}", *counts)
        table.add_section()
    return table
