"""Progress of all runs of a comparison: bars with the time left on a terminal, plain lines in a pipe."""

import statistics
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fourbits.compare.number_format import count, duration
from fourbits.compare.run.run_matrix import RunMatrix
from fourbits.train.listener import Record, RunListener, RunStart

# Decay per step of the running average of step times: steady enough to read, quick to follow a new recipe.
STEP_TIME_DECAY = 0.9


class MatrixProgress:
    """A bar for all runs and one for each run under way."""

    def __init__(self, matrix: RunMatrix, console: Console) -> None:
        self.matrix, self.console = matrix, console
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._all = self._bar.add_task("all runs", total=len(matrix.runs), numbers="")
        self._parts: dict[str, TaskID] = {}
        self._active: dict[int, RunProgress] = {}
        self._num_ended = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def preparing(self, part: str, done: int, total: int) -> None:
        """Bytes done of one part of the data."""
        if part not in self._parts:
            self._parts[part] = self._bar.add_task(part, total=total, numbers="")
        self._bar.update(self._parts[part], completed=done)
        if done >= total:
            self.plain(f"prepared {part}: read {total / 1e6:.1f} MB of files")

    def prepared(self) -> None:
        """The data are complete; remove their bars."""
        for task in self._parts.values():
            self._bar.remove_task(task)
        self._parts.clear()

    def start_run(self, number: int) -> "RunProgress":
        """The listener of a run that starts now; `end_run` ends it. number: in the matrix."""
        self._active[number] = RunProgress(self, self._bar, number)
        return self._active[number]

    def end_run(self, number: int) -> None:
        """Count a run as ended: executed now, or finished earlier."""
        self._active.pop(number, None)
        self._num_ended += 1
        self.refresh()

    def skip_runs(self, number: int) -> None:
        """Count a number of runs that will not execute as ended."""
        self._num_ended += number
        self.refresh()

    def refresh(self) -> None:
        """Update the bar of all runs."""
        done = self._num_ended + sum(run.share for run in self._active.values())
        self._bar.update(self._all, completed=done, numbers=self.time_left())

    def time_left(self) -> str:
        """Time until the last run ends, as text, if steps keep taking as long as the latest ones.

        Empty until a run has a second step: the first one includes tracing and compilation.
        """
        rates = [run.seconds for run in self._active.values() if run.seconds]
        if not rates:
            return ""
        mean = statistics.fmean(rates)
        active = [run.steps_left * (run.seconds or mean) for run in self._active.values()]
        pending = len(self.matrix.runs) - self._num_ended - len(active)
        seconds_per_run = mean * self.matrix.runs[0].config.train.num_steps
        return f"{duration(max(*active, (sum(active) + pending * seconds_per_run) / len(active)))} left"

    def note(self, text: str) -> None:
        """Print a line, on a terminal and in a pipe."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def plain(self, text: str) -> None:
        """Print a line in a pipe, where there are no bars."""
        if not self.console.is_terminal:
            self.note(text)


class RunProgress(RunListener):
    """Listens to one run of a comparison and shows its progress."""

    def __init__(self, progress: MatrixProgress, bar: Progress, number: int) -> None:
        run, self._progress, self._bar = progress.matrix.runs[number], progress, bar
        self.label = f"{run.recipe}, seed {run.seed} ({number + 1}/{len(progress.matrix.runs)})"
        self.first_step: int | None = None
        self.last_step, self.num_steps, self.seconds = 0, run.config.train.num_steps, 0.0
        self._task = bar.add_task(self.label, total=None, numbers="starting")

    @property
    def steps_left(self) -> int:
        """Steps that remain."""
        return self.num_steps - self.last_step

    @property
    def share(self) -> float:
        """Share of the run that is done, in [0, 1]."""
        return self.last_step / self.num_steps

    def begin(self, start: RunStart) -> None:
        """Show that the run is built and its first step is under way."""
        self.first_step = self.last_step = start.step
        self._bar.update(self._task, total=start.num_steps, completed=start.step, numbers="first step")
        share = start.conversion.share_of_flops
        self._progress.plain(f"{self.label}: {share:.0%} of linear-layer FLOPs quantized; {start.backend}")

    def step(self, record: Record) -> None:
        """Update the bars."""
        self.last_step, latest = record["step"], record["step_seconds"]
        if self.seconds:
            self.seconds = STEP_TIME_DECAY * self.seconds + (1 - STEP_TIME_DECAY) * latest
        elif self.last_step > (self.first_step or 0) + 1:  # the first step is traced and compiled
            self.seconds = latest
        numbers = f"loss {_loss(record['loss'])}  {count(record['tokens_per_second'])} tokens/s"
        self._bar.update(self._task, completed=self.last_step, numbers=numbers)
        self._progress.refresh()

    def validation(self, record: Record) -> None:
        """Print the validation loss in a pipe."""
        left = self._progress.time_left()
        self._progress.plain(
            f"{self.label}: step {record['step']}/{self.num_steps}, validation loss "
            f"{_loss(record['val_loss'])}{left and f', {left} in total'}"
        )

    def note(self, text: str) -> None:
        """Print a line about this run."""
        self._progress.note(f"{self.label}: {text}")

    def end(self, summary: Record) -> None:
        """Print the outcome of the run in one line."""
        self.close()
        if summary["ended"] == "finished":
            rate = count(summary["tokens_per_second"])
            self.note(f"finished, validation loss {_loss(summary['val_loss'])}, {rate} tokens/s")
        else:
            self.note(f"{summary['ended']} after step {summary['steps']} of {self.num_steps}")

    def close(self) -> None:
        """Remove the bar."""
        self._bar.update(self._task, visible=False)


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
