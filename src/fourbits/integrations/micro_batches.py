"""Computes where each micro-batch begins among the tokens of its step, over processes and accumulation."""

import warnings
from typing import Any

from torch import nn

from fourbits.linear.amax_policy import Reduce
from fourbits.linear.layer_state import converted_state
from fourbits.linear.step import set_step


class MicroBatches:
    """Calls set_step for each micro-batch, and reserves max_tokens tokens for it.

    max_tokens: the largest number of tokens that one process passes to a layer in one micro-batch. If all
    micro-batches have exactly that many, a multiple of 16, random bits do not depend on how a step is split
    into processes and micro-batches. rank, ranks: the process among those that read different data. reduce:
    as for set_step. Warns of a model without quantized layers. Raises ValueError for an invalid max_tokens.
    """

    def __init__(
        self, model: nn.Module, max_tokens: Any, rank: int = 0, ranks: int = 1, reduce: Reduce | None = None
    ) -> None:
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(
                f"fourbits: max_tokens must be a positive int, got {max_tokens!r}. Pass the most "
                "tokens of a micro-batch of one process: batch size times longest sequence."
            )
        self._model, self._rank, self._ranks, self._reduce = model, rank, ranks, reduce
        self._max_tokens, self._stride = max_tokens, -(-max_tokens // 16) * 16
        self._step, self._index = -1, 0
        self._layers = [(n, m) for n, m in model.named_modules() if converted_state(m) is not None]
        if not self._layers:
            warnings.warn(
                "fourbits: the model has no quantized layer, so nothing is quantized. Call "
                "fourbits.convert(model, recipe) before training.",
                stacklevel=4,
            )

    def begin(self, step: int) -> None:
        """Begin the next micro-batch of an optimizer step, or the first one of a new step.

        Raises ValueError if the micro-batch before it had more than max_tokens tokens, seen in eager layers.
        """
        self._require_room()
        self._index = self._index + 1 if step == self._step else 0
        self._step = step
        number = self._index * self._ranks + self._rank
        set_step(self._model, step, first_token=number * self._stride, reduce=self._reduce)

    def _require_room(self) -> None:
        for name, layer in self._layers:
            state = converted_state(layer)
            if state is not None and state.tokens_drawn > self._stride and self._step >= 0:
                raise ValueError(
                    f"fourbits: max_tokens must cover the tokens that a layer reads in a micro-batch, got "
                    f"{self._max_tokens}, and {name} has read {state.tokens_drawn}, so that random bits "
                    f"repeat. Pass max_tokens={state.tokens_drawn}."
                )
