"""transformers: a callback for its Trainer, TRL's included."""

from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from fourbits.integrations.checkpoint import restore_run_state, run_state
from fourbits.integrations.micro_batches import MicroBatches
from fourbits.integrations.pretrained import update_recipe
from fourbits.linear.amax_policy import Reduce


class FourbitsCallback(TrainerCallback, ExportableState):
    """Calls set_step before every micro-batch; checkpoints store the recipe, and a resumed run checks it.

    max_tokens: as for MicroBatches; by default the batch size times the longest sequence, `args.max_length`
    or the model's `max_position_embeddings`. reduce: as for set_step. strict: whether resuming with another
    recipe, seed or choice of layers is an error; otherwise it warns.
    """

    def __init__(self, max_tokens: int | None = None, reduce: Reduce | None = None, strict: bool = True):
        self._given: dict[str, Any] = {"max_tokens": max_tokens, "strict": strict}
        self._reduce, self._model, self._saved = reduce, None, dict[str, Any]()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: D102
        model, tokens = kwargs["model"], self._given["max_tokens"]
        tokens = _most_tokens(args, model) if tokens is None else tokens
        self._batches = MicroBatches(model, tokens, args.process_index, args.world_size, self._reduce)
        self._model: Any = model
        update_recipe(model)
        callbacks: Any = state.stateful_callbacks
        saved = callbacks.setdefault(type(self).__name__, {}).get("attributes", {}).get("_saved")
        if state.global_step:
            restore_run_state(model, saved, self._reduce, self._given["strict"])

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: D102
        self._batches.begin(state.global_step)

    on_substep_end = on_step_begin

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: D102
        update_recipe(self._model)  # set_recipe may have changed it
        if self._reduce is not None:  # on all ranks, because state() is called on the first one only
            self._saved = run_state(self._model, self._reduce)

    def state(self) -> dict[str, Any]:  # noqa: D102
        if self._reduce is None and self._model is not None:
            self._saved = run_state(self._model)
        return {"args": self._given, "attributes": {"_saved": self._saved}}


def _most_tokens(args: Any, model: Any) -> int:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    if longest := getattr(args, "max_length", None) or getattr(text, "max_position_embeddings", None):
        return args.train_batch_size * longest
    raise ValueError(
        "FourbitsCallback: max_tokens must be given, as the model's config has no longest sequence."
    )
