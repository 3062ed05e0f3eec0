"""accelerate: `track`, called once after `accelerator.prepare`."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator

from fourbits.integrations.checkpoint import restore_run_state, run_state
from fourbits.integrations.micro_batches import MicroBatches
from fourbits.linear.amax_policy import Reduce


class Run:
    """The position of a loop; created by `track`. The accelerator's save_state and load_state include it."""

    def __init__(
        self, accelerator: Accelerator, model: Any, tokens: int, reduce: Reduce | None, strict: bool
    ):
        self._accelerator, self._prepared, self._reduce, self._strict = accelerator, model, reduce, strict
        self._model: Any = accelerator.unwrap_model(model, keep_fp32_wrapper=True, keep_torch_compile=False)
        ranks = accelerator.process_index, accelerator.num_processes
        self._batches = MicroBatches(self._model, tokens, *ranks, reduce)
        #: the optimizer step of the last micro-batch, and whether it was that step's last one
        self._step, self._ends_step = 0, False

    @property
    def step(self) -> int:
        """Optimizer steps so far, with the one that the current micro-batch completes."""
        return self._step + self._ends_step

    @contextmanager
    def accumulate(self, *others: Any) -> Generator[None]:
        """`accelerator.accumulate(model, *others)` around one micro-batch, and set_step for it."""
        with self._accelerator.accumulate(self._prepared, *others):
            self._step, self._ends_step = self.step, self._accelerator.sync_gradients
            self._batches.begin(self._step)
            yield

    def state_dict(self) -> dict[str, Any]:
        """The state that `save_state` writes."""
        return {**run_state(self._model, self._reduce), "position": (self._step, self._ends_step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Raises ValueError for one of another recipe, seed or choice of layers."""
        restore_run_state(self._model, state, self._reduce, self._strict)
        self._step, self._ends_step = state["position"]


def track(
    accelerator: Accelerator, model: Any, max_tokens: int, reduce: Reduce | None = None, strict: bool = True
) -> Run:
    """The Run of a prepared model, registered for checkpointing. max_tokens, reduce: as for MicroBatches.

    strict: whether loading a state of another recipe, seed or choice of layers is an error, or a warning.
    """
    run = Run(accelerator, model, max_tokens, reduce, strict)
    accelerator.register_for_checkpointing(run)
    return run
