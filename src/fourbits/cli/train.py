"""Train a model with a recipe into a run folder, or resume a run.

CONFIG is a shipped preset (tiny, 30m, hybrid-12b ...), a YAML file, or RUN/config.yaml of an earlier run.
Every setting is an option: --recipe mxfp4, --optim.lr 3e-3, --train.steps 50, --data.paths TEXT (a file or
folder; '[A, B]' for several), --recipe.keep_bf16.last_blocks 2, --recipe.wgrad.lhs.rht 32 (sets the transform
on both operands). --recipe nvfp4+late-forward switches the forward pass to BF16 when the learning rate begins
to decay; docs/precision.md has more precision schedules, and how to write your own (recipe.schedule).

To resume an interrupted run, rerun the command or `fourbits train RUN/config.yaml`; the result is
bit-identical to that of an uninterrupted run. --train.steps may change on the way, as long as the learning
rates of the steps done do not. While it runs, kill -USR1 saves a checkpoint, and kill -USR2 records the next
step in RUN/profiles, a trace and a memory snapshot (docs/running.md). To continue with other settings,
--from RUN starts a new run. CONFIG and --from FOLDER start from a transformers model, in BF16 or NVFP4, with
its tokenizer, instead of CONFIG's, or from a DCP checkpoint of a Llama that torchtitan or Megatron-LM trained
(docs/exchange.md).
"""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fourbits.cli.errors import describe
from fourbits.cli.program import command_line
from fourbits.cli.run_page import repetition
from fourbits.compare.report.run_report import write_run_report
from fourbits.compare.terminal import print_table
from fourbits.data.whole_file import write_json
from fourbits.evaluation.at_checkpoints import checkpoint_evaluation
from fourbits.linear.summary import ConversionSummary
from fourbits.train.config import RunConfig, load_config
from fourbits.train.corruption import CorruptionError
from fourbits.train.imported import has_configuration, is_imported
from fourbits.train.listener import ProgressPrinter, RunStart
from fourbits.train.non_finite import NonFiniteError
from fourbits.train.presets import RUN_PRESETS
from fourbits.train.profile import StepProfile
from fourbits.train.ranks.join import joined
from fourbits.train.ranks.launcher import launched_rank
from fourbits.train.ranks.ranks import Ranks
from fourbits.train.rollback import RollbackError
from fourbits.train.run import run as train
from fourbits.train.run_folder import RunFolder
from fourbits.train.stop import exit_code
from fourbits.train.summary import Summary

EXAMPLE = "fourbits train tiny --out runs/tiny --recipe nvfp4"
OVERRIDES = True


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="a preset, a YAML file, or RUN/config.yaml"
    )
    parser.add_argument(
        "--from",
        dest="start",
        type=Path,
        metavar="RUN",
        help="start a new run from RUN (CONFIG: RUN's), RUN/checkpoints/step_N, or a model's folder",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="run folder (default: RUN when resuming, else a new folder in runs/)"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="record an early step in RUN/profiles, and on CUDA print the time of its kernels",
    )
    parser.add_argument("--json", action="store_true", help="print summary.json at the end instead of tables")


def run(args: Namespace) -> int:
    """Train. 0: finished; 124, 129, 130 or 143: saved at the time limit or a signal, and can be resumed."""
    source = args.config or _config_of(args.start)
    if args.start is not None and is_imported(args.start) and has_configuration(args.start):
        _refuse_model_settings(args.start, args.overrides)
    config = load_config(source, RUN_PRESETS, args.overrides)
    device = None if config.train.device == "auto" else config.train.device
    with joined(config.parallel, device) as ranks:
        out = Path(ranks.agreed(lambda: str(_folder(source, args.out, is_new=args.start is not None))))
        return _run(config, out, args, ranks)


def _run(config: RunConfig, out: Path, args: Namespace, ranks: Ranks) -> int:
    try:
        summary = train(
            config,
            out,
            listener=TrainPrinter(config.train.log_interval, tables=not args.json),
            start_from=args.start,
            on_profile=_profile_to(out, ranks.is_first, not args.json) if args.profile else None,
            ranks=ranks,
            on_checkpoint=checkpoint_evaluation(config.train, ranks),
        )
    except (NonFiniteError, RollbackError, CorruptionError):
        if ranks.is_first:
            _write_report(out)
        raise
    has_report = not ranks.is_first or _write_report(out)
    if ranks.is_first:
        if args.json:
            print(json.dumps(summary, indent=2))
        else:
            _print_summary(summary, out, has_report)
    if not has_report:
        return 1
    return 0 if summary["ended"] == "finished" else exit_code(summary["reason"])


class TrainPrinter(ProgressPrinter):
    """Prints progress on stderr, and before the first step the precision table on stdout."""

    def __init__(self, log_interval: int, tables: bool) -> None:
        super().__init__(Console(stderr=True), log_interval)
        self.tables = tables

    def begin(self, start: RunStart) -> None:
        """Print the precision table, the device, and the length of the run."""
        if self.tables:
            console = Console()
            print_table(precision_table(start.conversion), console)
            total = start.num_steps * start.tokens_per_step
            lines = [
                str(start.conversion),
                f"device: {start.device}; {start.backend}",
                f"data: {start.data}",
                f"{start.num_steps:,} steps of {start.tokens_per_step:,} tokens, {total:,} in total",
                f"output: {start.out}",
            ]
            if start.compiles:
                lines.append("the first step compiles the model, which takes a minute or two")
            console.print(Text("\n".join(lines)), soft_wrap=True)
            sys.stdout.flush()
        super().begin(start)


def precision_table(conversion: ConversionSummary) -> Table:
    """Every linear layer, its precision, and the reason."""
    table = Table("layer", "out x in", "precision", "reason", title="precision", title_justify="left")
    for row in conversion.rows:
        shape = f"{row.shape[0]} x {row.shape[1]}"
        table.add_row(Text(row.name), shape, row.precision, Text(row.reason))
    return table


def profile_table(found: StepProfile) -> Table:
    """Device time of a step by kind of kernel."""
    title = f"step: {found.total * 1e3:,.2f} ms of device time"
    table = Table("kind", "ms", "share", title=title, title_justify="left")
    for kind, seconds in found.seconds.items():
        table.add_row(kind, f"{seconds * 1e3:,.2f}", f"{found.share(kind):.1%}")
    return table


def _profile_to(out: Path, is_first: bool, tables: bool) -> Callable[[StepProfile], None]:
    """Write a profile to OUT/profile.json and print it, on rank 0."""

    def show(found: StepProfile) -> None:
        if not is_first:
            return
        write_json(out / "profile.json", found.to_dict())
        if tables:
            console = Console()
            print_table(profile_table(found), console)
            console.print(found.statement(), soft_wrap=True)

    return show


def _refuse_model_settings(start: Path, overrides: Mapping[str, str]) -> None:
    """Raises ValueError for settings that an imported model determines."""
    if given := [name for name in overrides if name.partition(".")[0] == "model"]:
        raise ValueError(f"--{given[0]}: the model is that of --from {start}. Remove the option.")


def _config_of(start: Path | None) -> str:
    """The config.yaml of the run to start from. Raises ValueError without one."""
    if start is None:
        raise ValueError("CONFIG must be given: a preset, a YAML file, or RUN/config.yaml.")
    if is_imported(start):
        raise ValueError(
            f"--from {start}: a transformers model has no settings for training. Also pass a CONFIG, such as "
            "the preset 30m; its model is ignored."
            if has_configuration(start)
            else f"--from {start}: a DCP checkpoint has no settings. Also pass a CONFIG with its model."
        )
    return str((start.parents[1] if start.parent.name == "checkpoints" else start) / "config.yaml")


def _folder(config: str, out: str | None, is_new: bool) -> Path:
    """The run folder: --out if given, else the run that the config belongs to, else a new folder."""
    path = Path(config)
    if out is not None:
        return Path(out)
    if path.name == "config.yaml" and is_new:
        return Path("runs") / f"{path.parent.absolute().name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if path.name == "config.yaml" and (
        (path.parent / "manifest.json").is_file() or RunFolder(path.parent).has_steps()
    ):
        return path.parent
    if (where := launched_rank()) is not None and where.may_restart:
        raise ValueError(
            "--out must be given with torchrun --max-restarts, so that a restart continues the run."
        )
    return Path("runs") / f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _write_report(out: Path) -> bool:
    """Write report.html. An error is printed, not raised, so that it never hides how the run ended."""
    try:
        if (out / "metrics.jsonl").stat().st_size:
            write_run_report(out, repetition(out))
    except Exception as error:  # noqa: BLE001 - an error in the page must not hide that the run has ended
        print(f"fourbits train: the report was not written: {describe(error)}", file=sys.stderr)
        return False
    return True


def _print_summary(summary: Summary, out: Path, has_report: bool) -> None:
    loss, bits = summary.get("val_loss"), summary.get("val_bits_per_byte")
    text = f"{summary['ended']} after {summary['steps']:,} steps, {summary['tokens']:,} tokens"
    if loss is not None:
        text += f": validation loss {loss:.4f} nats per token, {bits:.3f} bits per byte"
    print(text)
    if summary["steps"] and has_report:
        print(f"report: {out / 'report.html'}")
    if summary["ended"] != "finished":
        print(f"resume with: {command_line(['train', str(out / 'config.yaml')])}")
