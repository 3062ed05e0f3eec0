"""The trainer: builds the model, converts it to its recipe, and runs steps on its data."""

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from fourbits.data.stream.dataset import PreparedData
from fourbits.device import Backend, probe
from fourbits.evaluate import HeldOut, Loss, evaluate, split_sample, total_loss
from fourbits.linear.checkpoint_state import (
    kept_recipe_state,
    load_recipe_state,
    recipe_state,
    saturated_and_all,
)
from fourbits.linear.convert import convert
from fourbits.linear.monitor.health import sampling
from fourbits.linear.oscillation import OscillationReset
from fourbits.linear.step import enter_phase, set_step, stage_of
from fourbits.model.lm import LanguageModel
from fourbits.model.regions import compile_regions
from fourbits.train import cuda_graph
from fourbits.train.backend import resolve_backend
from fourbits.train.checkpoint import Checkpoint
from fourbits.train.config import RunConfig
from fourbits.train.cuda_graph import CapturedGradients
from fourbits.train.digests import GradientDigests
from fourbits.train.masters import bf16_masters
from fourbits.train.non_finite import NonFiniteError, first_in_backward, first_in_forward
from fourbits.train.optim import MasterOptimizer, master_of
from fourbits.train.precision import recipe_of_run
from fourbits.train.ranks.ranks import RankRequests, Ranks
from fourbits.train.rollback import RollbackCause, Rollbacks
from fourbits.train.samples import run_stream
from fourbits.train.schedule import learning_rate
from fourbits.train.spikes import SpikeDetector, SpikeState
from fourbits.train.step_result import PendingStep, StepResult

# A run that skips this many steps in a row will not recover.
MAX_SKIPPED_IN_A_ROW = 10
# Largest share of the memory that CUDA graphs may hold while a step runs kernel by kernel, which needs as
# much again.
_GRAPHS_SHARE = 0.45


def compile_model(model: LanguageModel, how: Literal["none", "regions", "model"]) -> None:
    """Set up the compilation that TrainConfig.compile selects; it happens at the first call."""
    if how == "regions":
        compile_regions(model)
    elif how == "model":
        for block in model.blocks:
            block.compile()


def recompute(model: LanguageModel, which: Literal["none", "selective", "full"]) -> None:
    """Recompute the blocks that TrainConfig.activation_checkpointing selects."""
    model.recompute_blocks, model.recompute_every = which != "none", 2 if which == "selective" else 1


class Trainer:
    """The state of a run: masters, optimizer, and `step`, the number of steps done."""

    def __init__(
        self, config: RunConfig, data: PreparedData, device: torch.device, ranks: Ranks | None = None
    ) -> None:
        """Build everything for `config`, whose model.vocab_size must be the data's. Raises ValueError.

        ranks: the processes that train together, on `device` each; all of them must build it.
        """
        train = config.train
        self.config, self.device = config, device
        self.ranks = Ranks(device) if ranks is None else ranks
        self._own = self.ranks.micro_batches(train.gradient_accumulation)
        self.step = 0
        self.stream = run_stream(config, data)
        self.held_out = {
            name: HeldOut.of(self.stream.validation(name, train.validation_samples), data.tokenizer)
            for name in data.validation
        }
        self.model = self.ranks.model(config.model, train.seed)
        recompute(self.model, train.activation_checkpointing)
        if config.optim.masters != "fp32":
            self.ranks.require_alone(f"optim.masters {config.optim.masters}", "fp32")
            bf16_masters(self.model)
        self.backend, self.backend_reason = resolve_backend(train.backend, probe(device))
        #: with the schedule in steps
        self.recipe = recipe_of_run(config, self.stream)
        self.conversion = convert(
            self.model,
            self.recipe,
            seed=train.seed,
            backend="native" if self.backend is Backend.NATIVE else "emulated",
        )
        compile_model(self.model, config.train.compile)
        self.masters = self.ranks.initialized_masters(self.model, train.seed)
        self.optimizer = MasterOptimizer(self.masters, config.optim, train.seed, self.ranks.norms)
        self.oscillation = self._oscillation_reset()
        self._stage, self._by_kernel = stage_of(self.model), False
        self._prepare_capture()
        # Non-zero after a non-finite step, to block all later updates until the host finds out and stops the
        # run.
        self._blocked = torch.zeros((), device=device, dtype=torch.float32)
        #: the last checked step, skipped steps in a row up to it, and why the last of them was skipped
        self.checked = self.skipped_in_a_row = 0
        self.skip_reason: str | None = None
        self._data_seconds, self.rollbacks = 0.0, Rollbacks()
        self.requests = RankRequests()  # of this process, which the next step passes on to other ranks
        self.spikes = SpikeDetector(device) if train.spike != "off" else None
        self._uncounted = torch.full((), math.nan, device=device, dtype=torch.float32)

    @contextmanager
    def kernel_by_kernel(self) -> Generator[None]:
        """Run the steps inside without CUDA graphs, for a profiler."""
        before, self._by_kernel = self._by_kernel, True
        try:
            yield
        finally:
            self._by_kernel = before

    @property
    def captures_next(self) -> bool:
        """Whether the next step captures CUDA graphs, if it runs nothing kernel by kernel."""
        return self._captured is not None and self._captured.captures_next and not self._by_kernel

    def run_step(self) -> PendingStep:
        """Run one optimizer step without waiting for the device."""
        lr = learning_rate(self.step, self.config.train.num_steps, self.config.optim)
        self._data_seconds = 0.0
        if self.oscillation is not None and self.step == 0:
            self.oscillation.step(0)
        sample = None
        if self._samples_health():
            with self.kernel_by_kernel(), sampling(self.model) as sample:
                self.ranks.whole_samples(sample)
                loss = self._accumulate_gradients()
        else:
            loss = self._accumulate_gradients()
        spiked, threshold = self._spike(loss)
        skips = self.config.train.spike in ("skip", "rollback")
        skips = spiked.float() if skips else torch.zeros_like(self._blocked)
        numbers = self.optimizer.step(lr, loss, torch.maximum(self._blocked, skips), self.step)
        finite = loss.isfinite() & numbers[1].isfinite()
        if self.config.train.non_finite != "skip":
            self._blocked = torch.maximum(self._blocked, (~finite).float())
        threshold = torch.where(finite, threshold, math.nan)  # a step that is not finite is no spike
        self.step += 1
        if self.oscillation is not None:
            self.oscillation.step(self.step)
        share = self._saturated(self._sums.saturated)
        numbers = torch.cat((self._sums.asked, torch.stack((loss, threshold, share)), numbers))
        return PendingStep(self.step, lr, self._data_seconds, numbers, sample)

    def _samples_health(self) -> bool:
        """Whether the next step samples the layers' health; if so, graphs may be freed to make room."""
        interval = self.config.train.health_interval
        if interval is None or (self.step + 1) % interval or self.config.train.compile == "model":
            return False
        self._make_room()
        return True

    def _make_room(self) -> None:
        """Free the memory of graphs if a step that runs kernel by kernel would not fit beside them."""
        if self._captured is not None:
            memory = torch.cuda.get_device_properties(self.device).total_memory
            if torch.cuda.max_memory_allocated(self.device) > _GRAPHS_SHARE * memory:
                self._prepare_capture()

    def digests(self) -> Tensor:
        """Compute the next step's first micro-batch, on every rank, and leave everything as it was.

        Returns the digests of its loss and of each gradient, int64 [1 + parameters], in the order of masters.
        """
        self._make_room()
        samples = self._begin(self.step, 0)
        whole = self.ranks.whole(self.model)
        parameters = {name: whole[name] for name in self.masters}
        with kept_recipe_state(self.model), GradientDigests(parameters) as found:
            self.ranks.before_backward(self.model, True)
            loss = self._gradients(samples)
        return found.with_loss(loss)

    def check(self, pending: PendingStep) -> StepResult:
        """Wait for a step's numbers. Raises NonFiniteError, naming step and layer, if the run must stop."""
        result, norms = pending.wait()
        self.checked = result.step
        if not result.skipped or result.spike_threshold is not None:
            self.skipped_in_a_row, self.skip_reason = 0, None
            return result
        self.skipped_in_a_row += 1
        self.skip_reason = self._cause(result, norms)
        if self.config.train.non_finite == "stop":
            raise NonFiniteError(f"step {result.step}: {self.skip_reason}. The update was skipped.")
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW and self.config.train.non_finite == "skip":
            raise NonFiniteError(
                f"step {result.step}: {self.skip_reason}, after {self.skipped_in_a_row - 1} skipped steps "
                "in a row. The run does not recover."
            )
        return result

    def rollback_cause(self, result: StepResult) -> RollbackCause | None:
        """Why the run has to roll back after a checked step, if it has to."""
        train, threshold = self.config.train, result.spike_threshold
        if threshold is not None and train.spike == "rollback":
            return RollbackCause(
                result.step, f"a loss spike: {result.loss:.4f} is above {threshold:.4f}", True
            )
        if self.skip_reason is not None and train.non_finite == "rollback":
            return RollbackCause(result.step, self.skip_reason, False)
        return None

    def validate(self) -> dict[str, Loss]:
        """The loss on the fixed samples of every source, and over all of them under "loss"."""
        train, ranks = self.config.train, None if self.ranks.alone else self.ranks.over_data()
        if ranks is not None:  # random bits as one process has them, after its last micro-batch
            self._set_step(self.step - 1, train.gradient_accumulation - 1, same_weights=False)
        losses = evaluate(self.model, self.held_out, train.micro_batch_size, ranks)
        return {"loss": total_loss(losses.values()), **losses}

    def non_finite_cause(self) -> str:
        """Where a validation loss that is not finite came from, in words."""
        name = self._first_in_forward(self.validate)
        return f"values are not finite {f'first in the output of {name}' if name else 'in the loss itself'}"

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of a checkpoint by file, with the recipe's state if it has any.

        Of several ranks, each gets DTensors of which it has a shard. All of them must call it.
        """
        state, stored = recipe_state(self.model, self.ranks.reduce), self.ranks.stored
        own = {
            "model": {name: stored(name, master) for name, master in self.masters.items()},
            "optimizer": {key: stored(master_of(key), x) for key, x in self.optimizer.state().items()},
        }
        if state:
            own["recipe"] = state
        if self.oscillation is not None and (followed := self.oscillation.state_dict()):
            own["oscillation"] = {key: stored(master_of(key), x) for key, x in followed.items()}
        return own

    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint without amax histories, which are small: masters, two FP32 moments, and four
        FP32 tensors of weights that are followed.
        """
        each = 8 if self.oscillation is None else 24
        return sum(master.nbytes + each * master.numel() for master in self.model.parameters())

    def resume(self, checkpoint: Checkpoint, *, other_recipe: bool = False) -> None:
        """Continue after the step of a checkpoint. Raises ValueError if it belongs to another model.

        other_recipe: its recipe differs, so the state of this one (amax histories, layouts) starts empty.
        """
        enter_phase(self.model, max(checkpoint.step - 1, 0))
        own = self.tensors()
        own.pop("oscillation", None)
        if other_recipe:
            own.pop("recipe", None)
        elif self.oscillation is not None and any(
            file.startswith("oscillation") for file in checkpoint.files
        ):
            followed = self.oscillation.empty_state(checkpoint.step)
            own["oscillation"] = {key: self.ranks.stored(master_of(key), x) for key, x in followed.items()}
        saved = {name: self.ranks.load(checkpoint, name, tensors) for name, tensors in own.items()}
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(saved["model"][name])
        self.optimizer.load_state(saved["optimizer"])
        if not other_recipe:
            load_recipe_state(self.model, saved.get("recipe", {}))
        if self.oscillation is not None:
            self.oscillation.load_state_dict(saved.get("oscillation", {}))
        self.step = self.checked = checkpoint.step
        self.skipped_in_a_row, self.skip_reason = 0, None
        self._blocked = torch.zeros_like(self._blocked)
        self.rollbacks = Rollbacks(**checkpoint.state.get("rollbacks", {}))
        self.stream.read_beyond(self.rollbacks.data_offset * self.config.train.samples_per_step)
        if self.spikes is not None:
            self.spikes.load(SpikeState(**checkpoint.state.get("spikes", {"losses": [], "in_a_row": 0})))

    @property
    def next_sample(self) -> int:
        """The first sample of the next step."""
        return (self.step + self.rollbacks.data_offset) * self.config.train.samples_per_step

    def _oscillation_reset(self) -> OscillationReset | None:
        """The reset of masters that oscillate, if the recipe has one."""
        oscillation = self.recipe.oscillation
        if oscillation is None:
            return None
        whole, part = self.ranks.whole_master, self.ranks.own_part
        return OscillationReset(self.model, oscillation, self.masters, whole, part)

    def _prepare_capture(self) -> None:
        """Decide whether micro-batches are replayed from CUDA graphs; they are captured again if so."""
        self.eager_because = self._why_eager()
        self._captured: CapturedGradients | None = None
        if self.eager_because is None:
            self._captured = CapturedGradients(self._gradients, self.model, list(self.masters.values()))

    def _accumulate_gradients(self) -> Tensor:
        """Gradients of the mean loss over the step's tokens. Returns that loss, FP32, on the device."""
        self.ranks.begin_step()
        for micro_batch in self._own:
            samples = self._begin(self.step, micro_batch)
            if self._stage != (stage := stage_of(self.model)):
                self._stage = stage  # a graph belongs to one precision
                self._prepare_capture()
            self.ranks.before_backward(self.model, micro_batch == self._own[-1])
            captured = None if self._by_kernel else self._captured
            loss = captured(samples, micro_batch == 0) if captured else self._gradients(samples)
            self.ranks.add(loss)
        self.ranks.collect_gradients(self.masters)
        self._sums = self.ranks.sums(saturated_and_all(self.model), self.requests)
        return self._sums.loss

    def _spike(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the loss is a spike, bool, and the threshold that it exceeds, FP32, NaN if it does not."""
        if self.spikes is None:
            return torch.zeros_like(loss, dtype=torch.bool), self._uncounted
        spiked, threshold = self.spikes.compare(loss)
        return spiked, torch.where(spiked, threshold, math.nan)

    def _saturated(self, counted: Tensor | None) -> Tensor:
        """Share of the step's blocks whose scale saturated, FP32, on the device; NaN if not counted."""
        if counted is None:
            return self._uncounted
        saturated, blocks = counted.to(torch.float64).unbind()
        return (saturated / blocks).to(torch.float32)

    def _gradients(self, samples: Tensor) -> Tensor:
        """Add the gradients of a micro-batch's share of the mean loss, and return that share."""
        loss = self._summed_loss(samples) / self.config.train.tokens_per_step
        loss.backward()
        return loss.detach()

    def _summed_loss(self, samples: Tensor) -> Tensor:
        return self.model.loss(*split_sample(samples))[0]

    def _begin(self, step: int, micro_batch: int) -> Tensor:
        """Samples [B, T + 1] of a micro-batch, on the device; also sets the counter of the random bits."""
        train = self.config.train
        first = micro_batch * train.micro_batch_size
        self._set_step(step, micro_batch, same_weights=micro_batch > self._own[0])
        start = time.perf_counter()
        step += self.rollbacks.data_offset
        samples = self.stream.batch(step * train.samples_per_step + first, train.micro_batch_size)
        self._data_seconds += time.perf_counter() - start
        batch = torch.from_numpy(samples)
        if self.device.type == "cuda":
            batch = batch.pin_memory()
        return batch.to(self.device, non_blocking=True)

    def _set_step(self, step: int, micro_batch: int, same_weights: bool) -> None:
        tokens = self.config.train.micro_batch_size * self.config.train.seq_len
        set_step(self.model, step, micro_batch * tokens, self.ranks.reduce, same_weights)
        if not same_weights:
            self.ranks.weights_changed()

    def _why_eager(self) -> str | None:
        """Why micro-batches are not replayed from CUDA graphs, or None."""
        if not self.config.train.cuda_graph:
            return "train.cuda_graph is false"
        if not self.ranks.alone:
            return "several ranks gather weights and sum gradients between kernels"
        return cuda_graph.unsupported(self.model, self.device)

    def _cause(self, result: StepResult, norms: list[float]) -> str:
        if math.isfinite(result.loss):
            name = first_in_backward(list(self.masters), norms)
            return f"the gradient of {name} is not finite" if name else "the gradient norm overflows"
        name = self._first_in_forward(self._all_forwards(result.step - 1))
        where = f"first in the output of {name}" if name else "in the first run only, not when repeated"
        return f"the loss is {result.loss}; values are not finite {where}"

    def _first_in_forward(self, forward: Callable[[], object]) -> str | None:
        """The first module whose output is not finite, on the first rank that has one."""
        names = [name for name, _ in self.model.named_modules()]
        own = first_in_forward(self.model, forward)
        found = self.ranks.first_of(None if own is None else names.index(own))
        return None if found is None else names[found]

    def _all_forwards(self, step: int) -> Callable[[], Any]:
        def forward() -> None:
            for micro_batch in self._own:
                self._summed_loss(self._begin(step, micro_batch))

        return forward
