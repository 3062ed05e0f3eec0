"""Lightning: a callback for its Trainer, of the package lightning or pytorch-lightning."""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from fourbits.integrations.checkpoint import restore_run_state, run_state
from fourbits.integrations.micro_batches import MicroBatches
from fourbits.linear.amax_policy import Reduce

_ENTRY = "fourbits"


class FourbitsCallback(Callback):
    """Calls set_step before every batch; checkpoints store the recipe, and a resumed run checks it.

    max_tokens, reduce: as for MicroBatches. strict: whether resuming with another recipe, seed or choice of
    layers is an error; otherwise it warns.
    """

    def __init__(self, max_tokens: int, reduce: Reduce | None = None, strict: bool = True) -> None:
        self._max_tokens, self._reduce, self._strict = max_tokens, reduce, strict

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: D102
        rank, ranks = trainer.global_rank, trainer.world_size
        self._batches = MicroBatches(pl_module, self._max_tokens, rank, ranks, self._reduce)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: D102
        self._batches.begin(trainer.global_step)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: D102
        checkpoint[_ENTRY] = run_state(pl_module, self._reduce)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: D102
        if trainer.state.fn == "fit":
            restore_run_state(pl_module, checkpoint.get(_ENTRY), self._reduce, self._strict)
