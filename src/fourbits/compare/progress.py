"""Progress over all runs of a comparison: bars with the time left on a terminal, plain lines in a pipe."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fourbits.compare.plan import Plan, PlannedRun
from fourbits.compare.words import count, duration
from fourbits.train.report import Record, Report, RunStart

# Of the rate from one step to the next: steady enough to read, quick enough to follow another recipe.
MEMORY_OF_RATE = 0.9


class CompareReport(Report):
    """Listens to one run after another. The time left takes all coming steps to be as long as the latest."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.plan, self.console = plan, console
        self.first_step: int | None = None
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._all = self._bar.add_task("all runs", total=len(plan.runs), numbers="")
        self._one = self._bar.add_task("", total=None, visible=False, numbers="")
        self._parts: dict[str, TaskID] = {}
        self._number, self._label, self._seconds, self._num_steps = 0, "", 0.0, 1
        self._val_loss: float | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def next_run(self, number: int, run: PlannedRun) -> None:
        """The run that comes now. number: 0 for the first."""
        self._number, self._num_steps = number, run.config.train.num_steps
        self._label = f"{run.recipe}, seed {run.seed} ({number + 1}/{len(self.plan.runs)})"
        self.first_step, self._val_loss = None, None
        self._bar.update(self._all, completed=number)

    def preparing(self, what: str, done: int, total: int) -> None:
        """Bytes done of one part of the data."""
        if what not in self._parts:
            self._parts[what] = self._bar.add_task(what, total=total, numbers="")
        self._bar.update(self._parts[what], completed=done)
        if done >= total:
            self._plain(f"prepared {what}: {total / 1e6:.1f} MB of text")

    def begin(self, start: RunStart) -> None:
        """The run is built."""
        for task in self._parts.values():
            self._bar.remove_task(task)
        self._parts.clear()
        self.first_step = start.step
        self._bar.update(
            self._one, description=self._label, total=start.num_steps, completed=start.step, visible=True
        )
        share = start.conversion.share_of_flops
        self._plain(f"{self._label}: {share:.0%} of the linears' FLOPs quantized; {start.backend}")

    def step(self, record: Record) -> None:
        """Move the bars."""
        latest = record["step_seconds"]
        settled = self._seconds > 0 and record["step"] > (self.first_step or 0) + 2
        self._seconds = MEMORY_OF_RATE * self._seconds + (1 - MEMORY_OF_RATE) * latest if settled else latest
        done = self._number + record["step"] / self._num_steps
        numbers = f"loss {_loss(record['loss'])}  {count(record['tokens_per_second'])} tokens/s"
        self._bar.update(self._one, completed=record["step"], numbers=numbers)
        self._bar.update(self._all, completed=done, numbers=f"{self._left(record['step'])} left")

    def validation(self, record: Record) -> None:
        """A line where output is piped."""
        self._plain(
            f"{self._label}: step {record['step']}/{self._num_steps}, validation loss "
            f"{_loss(record['val_loss'])}, {self._left(record['step'])} left in all"
        )

    def note(self, text: str) -> None:
        """Something worth a line anywhere."""
        self.console.print(f"{self._label}: {text}", markup=False, highlight=False, soft_wrap=True)

    def end(self, summary: Record) -> None:
        """The outcome of one run, in one line."""
        loss, rate = _loss(summary["val_loss"]), summary["tokens_per_second"] or 0
        self._bar.update(self._one, visible=False)
        self.note(f"{summary['ended']}, validation loss {loss}, {count(rate)} tokens/s")

    def _left(self, step: int) -> str:
        runs_left = len(self.plan.runs) - self._number - step / self._num_steps
        return duration(runs_left * self._num_steps * self._seconds)

    def _plain(self, text: str) -> None:
        if not self.console.is_terminal:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
