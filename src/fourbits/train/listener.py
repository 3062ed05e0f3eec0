"""The events of a run, and how they are shown on a terminal and in a pipe."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fourbits.linear.summary import ConversionSummary

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunStart:
    """A run before its first step.

    data: the size of its text; step: steps already done; compiles: whether the next one compiles.
    """

    out: Path
    step: int
    num_steps: int
    tokens_per_step: int
    device: str
    backend: str
    data: str
    conversion: ConversionSummary
    compiles: bool


class RunListener:
    """Receives the events of a run and ignores them. Override the methods of those you need."""

    def preparing(self, what: str, done: int, total: int) -> None:
        """Some bytes of one part of the data, the tokenizer or a source, are prepared."""

    def begin(self, start: RunStart) -> None:
        """The run is set up; the first step follows."""

    def step(self, record: Record) -> None:
        """A step has finished. record: its line in metrics.jsonl."""

    def validation(self, record: Record) -> None:
        """A validation has finished. record: its line in metrics.jsonl."""

    def note(self, text: str) -> None:
        """A message that is neither a step nor an error."""

    def rollback(self, record: Record) -> None:
        """The run returns to an earlier step. record: its line in metrics.jsonl. A note reports it, too."""

    def end(self, summary: Record) -> None:
        """The run has ended, successfully or not. summary: the content of summary.json."""


class ProgressPrinter(RunListener):
    """Shows a progress bar on a terminal, and elsewhere prints a line every `log_interval` steps."""

    def __init__(self, console: Console, log_interval: int, label: str = "training") -> None:
        self.console, self.log_interval, self.label = console, log_interval, label
        self._num_steps = 0
        self._val_loss: float | None = None
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True)
        self._task: TaskID | None = None
        self._parts: dict[str, TaskID] = {}

    def preparing(self, what: str, done: int, total: int) -> None:
        """Show a bar per part, or print a line when a part is done."""
        if not self.console.is_terminal:
            if done >= total:
                self._print(f"prepared {what}: read {total / 1e6:.1f} MB of files")
            return
        self._bar.start()
        if what not in self._parts:
            self._parts[what] = self._bar.add_task(what, total=total, numbers="")
        self._bar.update(self._parts[what], completed=done)

    def begin(self, start: RunStart) -> None:
        """Show the bar of the steps."""
        self._num_steps = start.num_steps
        for task in self._parts.values():
            self._bar.remove_task(task)
        if self.console.is_terminal:
            self._bar.start()
            self._task = self._bar.add_task(
                self.label, total=start.num_steps, completed=start.step, numbers=""
            )

    def step(self, record: Record) -> None:
        """Advance the bar, or print a line."""
        if self._task is not None:
            numbers = f"loss {_number(record['loss'])}  {_rate(record)}"
            numbers += f"  val {_number(self._val_loss)}" if self._val_loss is not None else ""
            self._bar.update(self._task, completed=record["step"], numbers=numbers)
        elif record["step"] % self.log_interval == 0 or record["step"] == self._num_steps:
            left = (self._num_steps - record["step"]) * record["step_seconds"]
            self._print(
                f"{self.label}: step {record['step']}/{self._num_steps}  loss {_number(record['loss'])}  "
                f"lr {record['lr']:.2e}  grad norm {_number(record['grad_norm'])}  {_rate(record)}  "
                f"{int(left // 60)}:{int(left % 60):02d} left"
            )
        if "spike_threshold" in record:
            what = "skipped, a loss spike" if record["skipped"] else "a loss spike"
            loss, threshold = record["loss"], record["spike_threshold"]
            self.note(f"step {record['step']}: {what}: {loss:.4f} is above {threshold:.4f}")
        elif record.get("skipped"):
            self.note(f"step {record['step']}: skipped, because values were not finite")

    def validation(self, record: Record) -> None:
        """Print the validation loss."""
        self._val_loss = record["val_loss"]
        self._print(
            f"{self.label}: step {record['step']}/{self._num_steps}  validation loss "
            f"{_number(record['val_loss'])}  {_number(record['val_bits_per_byte'], 3)} bits per byte"
        )

    def note(self, text: str) -> None:
        """Print the message."""
        self._print(f"{self.label}: {text}")

    def end(self, summary: Record) -> None:
        """Remove the bar."""
        if self.console.is_terminal:
            self._bar.stop()

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _number(value: float | None, digits: int = 4) -> str:
    return f"{value:.{digits}f}" if value is not None and math.isfinite(value) else "not finite"


def _rate(record: Record) -> str:
    mfu = record.get("mfu")
    return f"{record['tokens_per_second']:,.0f} tokens/s" + (f" (MFU {mfu:.1%})" if mfu is not None else "")
