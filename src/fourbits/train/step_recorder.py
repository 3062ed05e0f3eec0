"""Records single steps of a run on request, on all ranks, each into a file of its own.

A recorded step computes the same bits as any other, and only takes longer. Whatever fails in recording it, a
full disk for example, is reported and the run continues: a trace must not end a run.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fourbits.train.ranks.ranks import RankRequests
from fourbits.train.recording import Recording
from fourbits.train.step_result import PendingStep
from fourbits.train.trainer import Trainer

#: steps before the one of --profile, in which everything compiles
_WARM_UP = 2
TRACE_VIEWER, MEMORY_VIEWER = "https://ui.perfetto.dev", "https://pytorch.org/memory_viz"


class StepRecorder:
    """The recordings of a run, by all its ranks together."""

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        notify: Callable[[str], None],
        early: Callable[[Sequence[Any]], None] | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """folder: RUN/profiles; notify: called with a sentence per recording, for the log of this rank.

        early: receives the profiler's events of the third step from now, which is recorded without a request,
        and until then every kernel is launched by itself. settle: waits for saves in the background. Raises
        ValueError if a new run has too few steps; one that continues reports it, so that it can be restarted.
        """
        self._trainer, self._folder, self._notify, self._early = trainer, folder, notify, early
        self._settle = settle
        if trainer.ranks.is_first:  # no rank records before all have joined the first step
            _remove_unfinished(folder)
        self._early_step = trainer.step + _WARM_UP
        left = trainer.config.train.num_steps - trainer.step
        if early is not None and left <= _WARM_UP:
            few = f"--profile: needs {_WARM_UP + 1} remaining steps, the run has {left}"
            if trainer.step == 0:
                raise ValueError(f"{few}. Raise train.steps, or remove the option.")
            notify(f"{few}. The run continues without a recording.")
            self._early = None

    def due(self, requests: RankRequests) -> bool:
        """Whether to record the next step. A request waits until CUDA graphs have been captured."""
        if self._early is not None:
            return self._trainer.step >= self._early_step
        return requests.record and not self._trainer.captures_next

    def run_step(self, recorded: bool) -> PendingStep:
        """Run a step, recorded if it is due; then all ranks must call it."""
        if self._early is None:
            return self._recorded_step(None) if recorded else self._trainer.run_step()
        with self._trainer.kernel_by_kernel():
            if not recorded:
                return self._trainer.run_step()
            use, self._early = self._early, None
            return self._recorded_step(use)

    def _recorded_step(self, use: Callable[[Sequence[Any]], None] | None) -> PendingStep:
        step = self._trainer.step + 1
        # rank 0 chooses, before any rank creates a folder
        folder = self._folder / self._trainer.ranks.agreed(lambda: unused_name(self._folder, step))
        recording = Recording(self._trainer.device)
        recorded = self._try(step, "could not be recorded", recording.start)
        try:
            pending = self._trainer.run_step()
        except BaseException:
            if recorded:
                recording.cancel()
            raise
        recorded = recorded and self._try(step, "could not be recorded", recording.stop)
        self._settle()  # a save does not have to share the disk with a trace
        if recorded:
            self._write(recording, folder, step)
            if use is not None:
                self._try(step, "its profile could not be used", lambda: use(recording.events))
        # Until every rank has removed its temporary files, the run's files may lack space.
        self._trainer.ranks.gathered(None)
        self._trainer.ranks.progress()
        return pending

    def _write(self, recording: Recording, folder: Path, step: int) -> None:
        rank = self._trainer.ranks.rank
        files = {f"trace_rank{rank}.json.gz": (recording.write_trace, TRACE_VIEWER)}
        if recording.has_memory:
            files[f"memory_rank{rank}.pickle"] = (recording.write_memory, MEMORY_VIEWER)
        written: list[str] = []

        def write_all() -> None:
            for each in (self._folder, folder):  # not the run's folder, in case it was moved
                each.mkdir(exist_ok=True)
            for name, (write, viewer) in files.items():
                write(folder / name)
                size = (folder / name).stat().st_size / 1e6
                written.append(f"{name} ({size:,.1f} MB, open it in {viewer})")

        self._try(step, f"the recording could not be written to {folder}", write_all)
        if written:
            without = "" if recording.has_memory else ". A memory snapshot needs CUDA"
            self._notify(f"step {step}: recorded in {folder}: {', '.join(written)}{without}")

    def _try(self, step: int, what: str, do: Callable[[], object]) -> bool:
        """Whether it succeeded. An error is reported and ends nothing."""
        try:
            do()
        except Exception as error:  # noqa: BLE001 - whatever PyTorch's profiler raises
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._notify(
                f"step {step}: {what}: {reason}. The run continues without it. Remove the cause, for example "
                "free some space, and request it again."
            )
            return False
        return True


def _remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of recordings that were being written when a process was killed."""
    for each in folder.glob("*/*.tmp"):
        with contextlib.suppress(OSError):
            each.unlink()


def unused_name(folder: Path, step: int) -> str:
    """The name of a folder for a step's recording: step_N or, if a step N was recorded before, step_N_2."""
    taken = {path.name for path in folder.glob(f"step_{step}*")}
    names = (
        f"step_{step}" if number == 1 else f"step_{step}_{number}" for number in range(1, len(taken) + 2)
    )
    return next(name for name in names if name not in taken)
