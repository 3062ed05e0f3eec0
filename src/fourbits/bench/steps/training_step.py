"""The training step of `fourbits train`, on random tokens, callable repeatedly."""

import itertools

import torch
from torch import Tensor

from fourbits.linear.step import set_step
from fourbits.model.lm import LanguageModel
from fourbits.train import cuda_graph
from fourbits.train.config import RunConfig
from fourbits.train.cuda_graph import CapturedGradients
from fourbits.train.optim import MasterOptimizer

#: small enough that all steps have practically the same weights
_LR = 1e-6


class TrainingStep:
    """Micro-batches forward and backward, clipping and AdamW; the run sets their shape and number.

    On a GPU, micro-batches are replayed from CUDA graphs if the trainer would do so.
    """

    def __init__(self, model: LanguageModel, config: RunConfig) -> None:
        """model: converted, on its device; config: of a run, whose data and length have no effect."""
        self.model, self.config = model, config
        self.device = model.embed.weight.device
        self.masters = dict(model.named_parameters())
        self.optimizer = MasterOptimizer(self.masters, config.optim)
        shape = (config.train.micro_batch_size, config.train.seq_len + 1)
        self.samples = torch.randint(config.model.vocab_size, shape, device=self.device, dtype=torch.int64)
        self.eager_because = cuda_graph.unsupported(model, self.device)
        if self.eager_because is None and not config.train.cuda_graph:
            self.eager_because = "train.cuda_graph is false"
        self._captured: CapturedGradients | None = None
        if self.eager_because is None:
            self._captured = CapturedGradients(self._gradients, model, list(self.masters.values()))
        self._not_blocked = torch.zeros((), device=self.device, dtype=torch.float32)
        self._steps = itertools.count()

    def __call__(self) -> Tensor:
        """Run one optimizer step without waiting for the device. Returns what `MasterOptimizer.step` returns.

        Raises RuntimeError if micro-batches cannot be captured.
        """
        return self._step(self._captured)

    def kernel_by_kernel(self) -> Tensor:
        """Run the same step without CUDA graphs."""
        return self._step(None)

    def _step(self, captured: CapturedGradients | None) -> Tensor:
        number, loss, train = next(self._steps), self._not_blocked, self.config.train
        for micro_batch in range(train.gradient_accumulation):
            first = micro_batch * train.micro_batch_size * train.seq_len
            set_step(self.model, number, first, same_weights=micro_batch > 0)
            loss = captured(self.samples, micro_batch == 0) if captured else self._gradients(self.samples)
        return self.optimizer.step(_LR, loss, self._not_blocked)

    def one_micro_batch(self) -> Tensor:
        """Run a step of one micro-batch, kernel by kernel."""
        self.begin_step()
        return self.optimizer.step(_LR, self._gradients(self.samples), self._not_blocked)

    def begin_step(self) -> None:
        """Begin the first micro-batch of a step."""
        set_step(self.model, next(self._steps))

    def _gradients(self, samples: Tensor) -> Tensor:
        summed, _ = self.model.loss(samples[:, :-1], samples[:, 1:])
        loss = summed / self.config.train.tokens_per_step
        loss.backward()
        return loss.detach()
