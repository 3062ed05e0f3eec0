"""A run in one process: set up or resume, loop over steps, and record how it ended."""

import contextlib
import math
import signal
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from fourbits.compile_notice import compilation_disabled
from fourbits.data.stream.dataset import PreparedData
from fourbits.data.whole_file import file_sha256
from fourbits.device import Device, probe
from fourbits.train.background import BackgroundSaver
from fourbits.train.checkpoint import Checkpoint, open_checkpoint
from fourbits.train.config import RunConfig
from fourbits.train.fork import Fork
from fourbits.train.health_log import HealthLog
from fourbits.train.imported import Imported
from fourbits.train.keeper import CheckpointKeeper, last_good, remedy_of, require_space
from fourbits.train.listener import RunListener, RunStart
from fourbits.train.manifest import describe_run
from fourbits.train.memory import PeakMemory
from fourbits.train.metrics import ROLLBACK, MetricsFile, copy_records
from fourbits.train.non_finite import NonFiniteError
from fourbits.train.precision import phase_at
from fourbits.train.profile import StepProfile, from_events
from fourbits.train.ranks.follower import FollowerKeeper, FollowerMetrics
from fourbits.train.ranks.ranks import RankRequests, Ranks
from fourbits.train.recompute_check import RecomputeCheck
from fourbits.train.records import peak_rate, step_record, validation_record
from fourbits.train.rollback import RollbackCause, RollbackPolicy
from fourbits.train.run_folder import RunFolder
from fourbits.train.starting import start
from fourbits.train.step_recorder import StepRecorder
from fourbits.train.step_result import PendingStep
from fourbits.train.stop import TIME_LIMIT, Clock, StopRequest
from fourbits.train.summary import Summary, summarize
from fourbits.train.timing import Timestamp
from fourbits.train.trainer import Trainer

Metrics = MetricsFile | FollowerMetrics


class Session:
    """A run in this process, from its first or resumed step to its end.

    Of several ranks, each has one. They make the same decisions, and rank 0 writes the files.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        data: PreparedData,
        listener: RunListener,
        on_profile: Callable[[StepProfile], None] | None = None,
        fork: Fork | Imported | None = None,
        started: float | None = None,
        ranks: Ranks | None = None,
        on_checkpoint: Callable[[Path], None] | None = None,
    ) -> None:
        """Build the trainer, continue from the newest checkpoint or start from `fork`, write the manifest.

        started: when the run began, by time.monotonic, for its time limit; None: now.
        """
        self.clock = Clock(config.train, time.monotonic() if started is None else started)
        self.folder, self.config, self.listener = folder, config, listener
        self.on_checkpoint = on_checkpoint
        self.device: Device = probe(None if config.train.device == "auto" else config.train.device)
        torch_device = torch.device(self.device.torch_device)
        self.memory = PeakMemory(torch_device)
        self.trainer = Trainer(config, data, torch_device, ranks)
        self.ranks = ranks = self.trainer.ranks
        self._sizes = data.sizes()
        self.recompute_check = RecomputeCheck(self.trainer, self.device, folder.checkpoints, listener.note)
        notes = (self.trainer.stream.rounding(), self.trainer.stream.repetition(), *ranks.notes())
        notes += (*self.recompute_check.notes(),)
        for note in filter(None, notes):
            listener.note(note)
        needed = self.trainer.checkpoint_bytes()
        policy = RollbackPolicy.of(config.train, 0)
        ranks.agreed(lambda: require_space(folder.checkpoints, config.train.keep_checkpoints, needed, policy))
        if isinstance(fork, Imported):
            fork.load(self.trainer)  # before the weights are hashed
        manifest = describe_run(self.trainer, data, self.device) if ranks.is_first else {}
        self._hashes = {name: manifest["hashes"][name] for name in ("text", "validation") if ranks.is_first}
        checkpoint = start(fork, self.trainer, folder, self.device, manifest, listener)
        early = from_events(on_profile)
        self.recorder = StepRecorder(
            self.trainer, folder.profiles, listener.note, early, settle=lambda: self.keeper.settle()
        )
        folder.begin(config, manifest, data.tokenizer)
        start_step = manifest["ancestry"][-1]["step"] if manifest.get("ancestry") else 0
        self.rollback = RollbackPolicy.of(config.train, start_step)
        self._keep_checkpoints(checkpoint, fork)
        self.peak_tokens_per_second = peak_rate(self.device, config, ranks.world)
        self.waiting: PendingStep | None = None
        self.health: HealthLog | None = None
        if ranks.is_first:
            self.health = HealthLog(folder.health, self.trainer.step, listener.note)
        self._agreed = RankRequests()
        self._last = Timestamp(torch_device)

    def _keep_checkpoints(self, checkpoint: Checkpoint | None, fork: Fork | Imported | None) -> None:
        """Set up the checkpoints. One of another run, or one for rollbacks, is saved at once.

        checkpoint: the one that the run continues from.
        """
        train, folder, ranks = self.config.train, self.folder, self.ranks
        state, resumed = (checkpoint.state, checkpoint.step) if checkpoint else ({}, None)
        self._metrics_sha256, self._metrics_size = state.get("metrics"), state.get("metrics_size")
        keeper = CheckpointKeeper if ranks.is_first else FollowerKeeper
        self.keeper = keeper(
            *(folder.checkpoints, train.keep_checkpoints, train.keep_every, resumed, ranks.save),
            background=self._saver(),
            rollback=self.rollback,
        )
        if ranks.is_first and isinstance(fork, Fork):
            copy_records(fork.run.metrics, folder.metrics, self.trainer.step, self._metrics_size)
            self._metrics_sha256 = file_sha256(folder.metrics)
            self._metrics_size = folder.metrics.stat().st_size
        if fork or (self.rollback and checkpoint is None):
            self._save(self._metrics_sha256 or sha256().hexdigest(), self._metrics_size or 0)

    def run(self, request: StopRequest) -> Summary:
        """Train, and write summary.json however the run ends. Raises ValueError for damaged metrics."""
        with self._metrics() as metrics:
            self.listener.begin(self._start())
            self.trainer.skipped_in_a_row = self.ranks.agreed(lambda: metrics.skipped_in_a_row)
            try:
                ended = self._loop(metrics, request)
            except NonFiniteError as error:
                with contextlib.suppress(Exception):
                    self.keeper.settle()
                good = last_good(self.folder.checkpoints, self._first_bad())
                explained = NonFiniteError(f"{error} {remedy_of(good)}")
                self._end_with_error("non-finite", str(explained), good)
                raise explained from error
            except KeyboardInterrupt:
                self._end_with_error("interrupted", "Ctrl-C, without saving")
                raise
            except Exception as error:  # noqa: BLE001 - raised again, explained
                explained = self.ranks.explained(error)
                self._end_with_error("failed", f"{type(explained).__name__}: {explained}")
                raise explained from explained.__cause__
            stop = request.signal if self.ranks.alone else self._agreed.signal
            why = signal.Signals(stop).name if stop else TIME_LIMIT
            metrics.require_in_place()
            return self._end(ended, why if ended == "interrupted" else None)

    def _end(self, ended: str, reason: str | None, good: Path | None = None) -> Summary:
        if not self.ranks.is_first:
            steps = self.trainer.step
            summary: Summary = {"ended": ended, "reason": reason, "steps": steps}
            self.listener.end(summary)
            return summary
        ancestry = self.folder.ancestry()
        first_step = ancestry[-1].get("step", 0) if ancestry else 0
        summary = summarize(self.folder.metrics, ended, reason, good, first_step)
        self.folder.write_summary(summary)
        self.listener.end(summary)
        return summary

    def _end_with_error(self, ended: str, reason: str, good: Path | None = None) -> None:
        """Record how the run ended. If that fails, too, the user should see the first error."""
        with contextlib.suppress(OSError, ValueError):
            self._end(ended, reason, good)

    def _first_bad(self) -> int:
        """The first step that was not finite; if all were, the next one, which has bad weights."""
        return self.trainer.checked - self.trainer.skipped_in_a_row + 1

    def _metrics(self) -> Metrics:
        if self.ranks.is_first:
            at = self.trainer.step, self._metrics_sha256, self._metrics_size
            return MetricsFile(self.folder.metrics, *at)
        return FollowerMetrics()

    def _loop(self, metrics: Metrics, request: StopRequest) -> str:
        train, trainer, last = self.config.train, self.trainer, False
        self._last = Timestamp(self.trainer.device)
        while trainer.step < train.num_steps and not last:
            try:
                last = self._advance(metrics, request)
            except RollbackCause as cause:
                self._roll_back(cause, metrics)
        self.keeper.settle()
        if self._agreed.record or request.take_record():
            self.listener.note("no step was left to record")
        if trainer.step < train.num_steps:
            return "interrupted"
        self._require_good()  # also if all steps were done when the run was resumed
        self.keeper.remove_old()
        return "finished"

    def _advance(self, metrics: Metrics, request: StopRequest) -> bool:
        """Train a step, validate and save where it is due. Returns whether to end after it."""
        train, trainer = self.config.train, self.trainer
        own = self._requests(request)
        if self.ranks.alone:
            self._agreed = own.after(self._agreed)
        else:
            trainer.requests = own
        if self.recompute_check.due():
            self._log_waiting(metrics)
            self.recompute_check.run(lambda record: self._append(metrics, record))
            self._last = Timestamp(trainer.device)
        if recorded := self.recorder.due(self._agreed):
            self._log_waiting(metrics)
        pending = self.recorder.run_step(recorded)
        if recorded:
            self._record_recorded(pending, metrics, request)
        else:
            self._record(pending, metrics)
        if self.ranks.alone:
            self._agreed = self._requests(request).after(self._agreed)
        last = trainer.step == train.num_steps or self._agreed.stop
        if trainer.step == train.num_steps or _due(trainer.step, train.validation_interval):
            self._log_waiting(metrics)
            self._validate(metrics)
        if trainer.step == train.num_steps:
            self._require_good()
        if last or self._agreed.save or _due(trainer.step, train.checkpoint_interval):
            self._log_waiting(metrics)
            metrics.sync()
            self._save(metrics.sha256, metrics.size)
            self.clock.saved()
            self._agreed = self._agreed._replace(save=False)
            if self.on_checkpoint and train.evaluates(trainer.step) and not trainer.skipped_in_a_row:
                self.keeper.settle()
                self.on_checkpoint(self.folder.checkpoints / f"step_{trainer.step}")
            self._last = Timestamp(trainer.device)
        return last

    def _roll_back(self, cause: RollbackCause, metrics: Metrics) -> None:
        """Return to a checkpoint before a step that went wrong, on all ranks, and skip its data."""
        trainer, self.waiting = self.trainer, None
        self.keeper.settle()
        to = self._rollback_target(cause)
        rollbacks = trainer.rollbacks.after(cause, to)
        samples = self.config.train.samples_per_step
        trainer.stream.read_beyond(rollbacks.data_offset * samples)
        record = {"kind": ROLLBACK, "step": cause.step, "to": to, "reason": cause.reason}
        self._append(metrics, record | rollbacks._asdict())
        metrics.sync()
        state = {
            "rollbacks": rollbacks._asdict(),
            "next_sample": (to + rollbacks.data_offset) * samples,
            "metrics": metrics.sha256,
            "metrics_size": metrics.size,
        }
        self.ranks.agreed(lambda: self.keeper.return_to(to, state))
        checkpoint = self.folder.checkpoints / f"step_{to}"
        trainer.resume(open_checkpoint(checkpoint, self.ranks.rank, self.ranks.world))
        if self.ranks.is_first:
            self.health = HealthLog(self.folder.health, to, self.listener.note)
        self.listener.rollback(record)
        self.listener.note(
            f"step {cause.step}: rolled back to step {to}: {cause.reason}. The data of these "
            f"{cause.step - to} steps are skipped."
        )
        self._last = Timestamp(trainer.device)

    def _rollback_target(self, cause: RollbackCause) -> int:
        """The step to return to, on all ranks. Raises what `RollbackPolicy.error` returns."""
        policy, count = self.rollback, self.trainer.rollbacks.count
        assert policy is not None
        to = self.ranks.agreed(lambda: policy.target(self.keeper.saved(), cause.step, count))
        if to is None:
            raise policy.error(cause, count, self.folder.checkpoints)
        return to

    def _saver(self) -> BackgroundSaver | None:
        """The background saver, if the run has one. Its memory is allocated here, before any step."""
        if not self.config.train.background_saves:
            return None
        saver = self.ranks.saver()
        saver.reserve(self.trainer.tensors())
        return saver

    def _requests(self, request: StopRequest) -> RankRequests:
        """The requests that this process received since the last call."""
        save = request.take_save() or self.clock.save_due()
        return RankRequests(request.signal or 0, self.clock.is_up(), save, request.take_record())

    def _require_good(self) -> None:
        """Raises NonFiniteError if the run ends within a streak of skipped steps."""
        trainer = self.trainer
        if trainer.skipped_in_a_row:
            raise NonFiniteError(
                f"step {trainer.step}: {trainer.skip_reason}. The run ends within a streak of "
                f"{trainer.skipped_in_a_row} skipped steps, so it is not finished."
            )

    def _record_recorded(self, pending: PendingStep, metrics: Metrics, request: StopRequest) -> None:
        """Log a step that was recorded, for all requests until now, also if the run returns to one before."""
        try:
            self._record(pending, metrics)
            self._log_waiting(metrics)
        finally:
            request.take_record()
            self._agreed = self._agreed._replace(record=False)
        self._last = Timestamp(self.trainer.device)  # writing files is no part of the next step

    def _record(self, pending: PendingStep, metrics: Metrics) -> None:
        """Log the step before this one, and this one too if its numbers have already arrived.

        Several ranks on GPUs never check that: when a number arrives differs by rank, and decisions must not.
        """
        self._log_waiting(metrics)
        self.waiting = pending
        if not pending.in_flight and (self.ranks.alone or self.device.torch_device == "cpu"):
            self._log_waiting(metrics)

    def _log_waiting(self, metrics: Metrics) -> None:
        if self.waiting is None:
            return
        pending, self.waiting = self.waiting, None
        result = self.trainer.check(pending)
        self._agreed = result.requests.after(self._agreed)
        seconds, self._last = result.finished.seconds_since(self._last), result.finished
        tokens, peak = self.config.train.tokens_per_step, self.peak_tokens_per_second
        record = step_record(result, tokens, seconds, peak, self.memory.read())
        if self.trainer.recipe.schedule:
            record["phase"], change = phase_at(self.trainer.recipe, result.step)
            if change:
                self.listener.note(change)
        if pending.health is not None and self.health is not None:
            record |= self.health.take(pending.health, result.step)
        if self.trainer.rollbacks.data_offset:
            record["data_offset"] = self.trainer.rollbacks.data_offset
        self._append(metrics, record)
        self.listener.step(record)
        if (cause := self.trainer.rollback_cause(result)) is not None:
            raise cause
        if not result.skipped:
            self.keeper.proved(result.step)

    def _append(self, metrics: Metrics, record: dict[str, Any]) -> None:
        metrics.append(record)
        self.folder.require_lock()

    def _validate(self, metrics: Metrics) -> None:
        losses = self.trainer.validate()
        record = validation_record(self.trainer.step, self.config.train.tokens_per_step, losses)
        self._append(metrics, record)
        self.listener.validation(record)
        if not math.isfinite(loss := losses["loss"].per_token):
            self._validation_failed(loss)
        self._last = Timestamp(self.trainer.device)

    def _validation_failed(self, loss: float) -> None:
        """Raises NonFiniteError, unless later steps may still be skipped until the run recovers."""
        train, step = self.config.train, self.trainer.step
        text = f"step {step}: the validation loss is {loss}; {self.trainer.non_finite_cause()}"
        if train.non_finite == "rollback":
            raise RollbackCause(step, text.partition(": ")[2], False)
        if train.non_finite == "stop" or step == train.num_steps:
            raise NonFiniteError(f"{text}. The weights after this step are not usable.")
        self.listener.note(text)

    def _save(self, metrics_sha256: str, metrics_size: int) -> None:
        step = self.trainer.step
        if streak := self.trainer.skipped_in_a_row:
            self.listener.note(f"step {step}: not saved, within a streak of {streak} skipped steps")
            return
        state: dict[str, Any] = {
            "next_sample": self.trainer.next_sample,
            "rollbacks": self.trainer.rollbacks._asdict(),
            "recipe": self.config.recipe.digest,
            "hashes": self._hashes,
            "metrics": metrics_sha256,
            "metrics_size": metrics_size,
        }
        if self.trainer.spikes is not None:
            state["spikes"] = self.trainer.spikes.state()._asdict()
        self.keeper.save(step, self.trainer.tensors(), state)

    def _start(self) -> RunStart:
        return RunStart(
            out=self.folder.path,
            step=self.trainer.step,
            num_steps=self.config.train.num_steps,
            tokens_per_step=self.config.train.tokens_per_step,
            device=self.device.name + (f", {self.ranks.world} ranks" if self.ranks.world > 1 else ""),
            backend=self.trainer.backend_reason,
            data=self._sizes,
            conversion=self.trainer.conversion,
            compiles=self.config.train.compile != "none" and not compilation_disabled(),
        )


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
