"""Generates a batch of sequences token by token; on a GPU, each step replays a captured CUDA graph."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from fourbits.evaluate import evaluation_mode, uncompiled
from fourbits.generate.cache import Cache, empty_cache
from fourbits.generate.forward import read_prompts, read_token
from fourbits.generate.sampling import Sampling, chosen
from fourbits.model.linear import Linear
from fourbits.model.lm import LanguageModel

#: steps that run before capture, because libraries initialize themselves in their first calls
WARMUP = 2


@contextmanager
def ready(model: LanguageModel) -> Generator[None]:
    """Set the model to evaluation, uncompiled and without gradients; BF16 layers round their masters once."""
    dtype = model.norm.out_dtype or model.residual_dtype
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluation_mode(model))
        stack.enter_context(uncompiled(model))
        for module in model.modules():
            if type(module) is Linear:
                stack.enter_context(module.rounded_once(dtype))
        yield


class Decoder:
    """Continues a batch of prompts. `next` returns a token per sequence; its tensors stay on the device."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: Tensor,
        lengths: Tensor,
        capacity: int,
        sampling: Sampling,
        num_ids: int | None = None,
    ) -> None:
        """Read the prompts; call this and `next` inside `ready(model)`.

        prompts: int64 [B, T], padded at the end of each row; lengths: int64 [B]; capacity: tokens of the
        longest sequence when it ends; num_ids: only tokens below it are chosen.
        """
        self._model, self._sampling, self._num_ids = model, sampling, num_ids
        self.cache: Cache = empty_cache(model, len(prompts), capacity)
        self._logits = read_prompts(model, prompts, lengths, self.cache)
        self._tokens = torch.zeros_like(lengths)
        self._step: Callable[[], Tensor] = self._read
        self._steps = 0

    def next(self, draws: Tensor) -> Tensor:
        """Choose the next token of every sequence, int64 [B]. draws: uniform in [0, 1), FP32 [B]."""
        if self._steps:
            self._logits = self._step()
            if self._tokens.is_cuda and self._steps == WARMUP:
                self._step = self._captured()
        self._steps += 1
        tokens = chosen(self._logits[:, : self._num_ids], draws, self._sampling)
        self._tokens.copy_(tokens)
        return tokens

    def _read(self) -> Tensor:
        return read_token(self._model, self._tokens, self.cache)

    def _captured(self) -> Callable[[], Tensor]:
        """A function that replays `_read`: the same kernels on the same addresses. Capturing runs nothing."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._read()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
