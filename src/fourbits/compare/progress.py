"""Progress over all runs of a comparison: bars with the time left on a terminal, plain lines in a pipe."""

import statistics
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fourbits.compare.plan import Plan
from fourbits.compare.words import count, duration
from fourbits.train.report import Record, Report, RunStart

# Of the rate from one step to the next: steady enough to read, quick enough to follow another recipe.
MEMORY_OF_RATE = 0.9


class CompareReport:
    """A bar for all runs and one for each that is being made."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.plan, self.console = plan, console
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._all = self._bar.add_task("all runs", total=len(plan.runs), numbers="")
        self._parts: dict[str, TaskID] = {}
        self._active: dict[int, RunReport] = {}
        self._num_over = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def preparing(self, what: str, done: int, total: int) -> None:
        """Bytes done of one part of the data."""
        if what not in self._parts:
            self._parts[what] = self._bar.add_task(what, total=total, numbers="")
        self._bar.update(self._parts[what], completed=done)
        if done >= total:
            self.plain(f"prepared {what}: {total / 1e6:.1f} MB of text")

    def prepared(self) -> None:
        """The data are there; take their bars away."""
        for task in self._parts.values():
            self._bar.remove_task(task)
        self._parts.clear()

    def listen(self, number: int) -> "RunReport":
        """What listens to a run from now until it is told that the run is over. number: in the plan."""
        self._active[number] = RunReport(self, self._bar, number)
        return self._active[number]

    def over(self, number: int) -> None:
        """A run was made, or need not be made."""
        self._active.pop(number, None)
        self._num_over += 1
        self.refresh()

    def refresh(self) -> None:
        """Move the bar of all runs."""
        done = self._num_over + sum(run.share for run in self._active.values())
        self._bar.update(self._all, completed=done, numbers=self.time_left())

    def time_left(self) -> str:
        """Until the last run ends, in words, if coming steps are as long as the latest of those under way.

        Empty while none is: the first step of a run is longer than the others.
        """
        rates = [run.seconds for run in self._active.values() if run.seconds]
        if not rates:
            return ""
        mean = statistics.fmean(rates)
        own = [run.steps_left * (run.seconds or mean) for run in self._active.values()]
        waiting = len(self.plan.runs) - self._num_over - len(own)
        whole = mean * self.plan.runs[0].config.train.num_steps
        return f"{duration(max(*own, (sum(own) + waiting * whole) / len(own)))} left"

    def note(self, text: str) -> None:
        """Something worth a line anywhere."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def plain(self, text: str) -> None:
        """A line where there are no bars."""
        if not self.console.is_terminal:
            self.note(text)


class RunReport(Report):
    """Listens to one run of a comparison."""

    def __init__(self, whole: CompareReport, bar: Progress, number: int) -> None:
        run, self._whole, self._bar = whole.plan.runs[number], whole, bar
        self.label = f"{run.recipe}, seed {run.seed} ({number + 1}/{len(whole.plan.runs)})"
        self.first_step: int | None = None
        self.last_step, self.num_steps, self.seconds = 0, run.config.train.num_steps, 0.0
        self._task = bar.add_task(self.label, total=None, numbers="starting")

    @property
    def steps_left(self) -> int:
        """Steps that are still to be made."""
        return self.num_steps - self.last_step

    @property
    def share(self) -> float:
        """How much of the run is done, in [0, 1]."""
        return self.last_step / self.num_steps

    def begin(self, start: RunStart) -> None:
        """The run is built."""
        self.first_step = self.last_step = start.step
        self._bar.update(self._task, total=start.num_steps, completed=start.step, numbers="first step")
        share = start.conversion.share_of_flops
        self._whole.plain(f"{self.label}: {share:.0%} of the linears' FLOPs quantized; {start.backend}")

    def step(self, record: Record) -> None:
        """Move the bars."""
        self.last_step, latest = record["step"], record["step_seconds"]
        if self.seconds:
            self.seconds = MEMORY_OF_RATE * self.seconds + (1 - MEMORY_OF_RATE) * latest
        elif self.last_step > (self.first_step or 0) + 1:  # the first step is traced and compiled
            self.seconds = latest
        numbers = f"loss {_loss(record['loss'])}  {count(record['tokens_per_second'])} tokens/s"
        self._bar.update(self._task, completed=self.last_step, numbers=numbers)
        self._whole.refresh()

    def validation(self, record: Record) -> None:
        """A line where output is piped."""
        left = self._whole.time_left()
        self._whole.plain(
            f"{self.label}: step {record['step']}/{self.num_steps}, validation loss "
            f"{_loss(record['val_loss'])}{left and f', {left} in all'}"
        )

    def note(self, text: str) -> None:
        """Something worth a line anywhere."""
        self._whole.note(f"{self.label}: {text}")

    def end(self, summary: Record) -> None:
        """The outcome of the run, in one line."""
        self.close()
        if summary["ended"] == "finished":
            rate = count(summary["tokens_per_second"])
            self.note(f"finished, validation loss {_loss(summary['val_loss'])}, {rate} tokens/s")
        else:
            self.note(f"{summary['ended']} after step {summary['steps']} of {self.num_steps}")

    def close(self) -> None:
        """Take the bar away."""
        self._bar.update(self._task, visible=False)


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
