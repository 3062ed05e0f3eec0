"""A training step as `fourbits train` makes it, on random tokens, that can be called again and again."""

import gc
import itertools

import torch
from torch import Tensor

from fourbits.linear.step import set_step
from fourbits.model.lm import LanguageModel
from fourbits.train.captured import CapturedGradients, why_not_captured
from fourbits.train.config import RunConfig
from fourbits.train.optim import MasterOptimizer

#: changes no weight to speak of, so that every step computes on the same
_LR = 1e-6


def release(device: torch.device) -> None:
    """Give memory that nobody holds back to the card, and begin a new peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


class TrainingStep:
    """Micro-batches forward and backward, clipping and AdamW: the shape and number of them is the run's.

    On a card micro-batches are replayed from CUDA graphs where the trainer would do so.
    """

    def __init__(self, model: LanguageModel, config: RunConfig) -> None:
        """model: converted, on its device; config: of the run, whose data and length have no effect."""
        self.model, self.config = model, config
        self.device = model.embed.weight.device
        self.masters = dict(model.named_parameters())
        self.optimizer = MasterOptimizer(self.masters, config.optim)
        shape = (config.train.micro_batch_size, config.train.seq_len + 1)
        self.samples = torch.randint(config.model.vocab_size, shape, device=self.device)
        self.eager_because = why_not_captured(model, self.device)
        if self.eager_because is None and not config.train.cuda_graph:
            self.eager_because = "train.cuda_graph is false"
        self._captured: CapturedGradients | None = None
        if self.eager_because is None:
            self._captured = CapturedGradients(self._gradients, model, list(self.masters.values()))
        self._not_blocked = torch.zeros((), device=self.device)
        self._steps = itertools.count()

    def __call__(self) -> Tensor:
        """One optimizer step; nothing waits for the device. Returns what `MasterOptimizer.step` does.

        Raises RuntimeError where micro-batches cannot be captured.
        """
        return self._step(self._captured)

    def kernel_by_kernel(self) -> Tensor:
        """The same step without CUDA graphs."""
        return self._step(None)

    def _step(self, captured: CapturedGradients | None) -> Tensor:
        now, loss, train = next(self._steps), self._not_blocked, self.config.train
        for micro_batch in range(train.gradient_accumulation):
            set_step(self.model, now, micro_batch * train.micro_batch_size * train.seq_len)
            loss = captured(self.samples, micro_batch == 0) if captured else self._gradients(self.samples)
        return self.optimizer.step(_LR, loss, self._not_blocked)

    def one_micro_batch(self) -> Tensor:
        """A step of one micro-batch, kernel by kernel."""
        set_step(self.model, next(self._steps))
        return self.optimizer.step(_LR, self._gradients(self.samples), self._not_blocked)

    def _gradients(self, samples: Tensor) -> Tensor:
        summed, _ = self.model.loss(samples[:, :-1], samples[:, 1:])
        loss = summed / self.config.train.tokens_per_step
        loss.backward()
        return loss.detach()
