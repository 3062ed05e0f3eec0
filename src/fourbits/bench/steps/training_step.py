"""The training step of `fourbits train`, on random tokens, callable repeatedly."""

import itertools

import torch
from torch import Tensor, nn

from fourbits.linear.step import set_step
from fourbits.model.lm import LanguageModel
from fourbits.train import cuda_graph
from fourbits.train.config import RunConfig
from fourbits.train.cuda_graph import CapturedGradients
from fourbits.train.determinism import deterministic
from fourbits.train.optim import MasterOptimizer
from fourbits.train.ranks.ranks import RankRequests, Ranks

#: so small that the weights hardly change
_LR = 1e-6


class TrainingStep:
    """Micro-batches forward and backward, clipping and AdamW; the run sets their shape and number.

    On a GPU, micro-batches are replayed from CUDA graphs if the trainer would do so.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: RunConfig,
        ranks: Ranks | None = None,
        masters: dict[str, nn.Parameter] | None = None,
    ) -> None:
        """model: converted, on its device; config: a run's, whose data and length have no effect.

        ranks: the ranks that train together, each with the micro-batches of `config`; masters: the weights
        that this rank updates. All ranks must call the step.
        """
        self.model, self.config = model, config
        self.device = model.embed.weight.device
        self.ranks = Ranks(self.device) if ranks is None else ranks
        self.masters = dict(model.named_parameters()) if masters is None else masters
        self.optimizer = MasterOptimizer(self.masters, config.optim, norms_of_whole=self.ranks.norms)
        shape = (config.train.micro_batch_size, config.train.seq_len + 1)
        self.samples = torch.randint(config.model.vocab_size, shape, device=self.device, dtype=torch.int64)
        self.eager_because = cuda_graph.unsupported(model, self.device)
        if not self.ranks.alone:
            self.eager_because = "several ranks"
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
        number, ranks, train = next(self._steps), self.ranks, self.config.train
        ranks.begin_step()
        for micro_batch in range(train.gradient_accumulation):
            first = micro_batch * train.micro_batch_size * train.seq_len
            set_step(self.model, number, first, ranks.reduce, same_weights=micro_batch > 0)
            if micro_batch == 0:
                ranks.weights_changed()
            ranks.before_backward(self.model, micro_batch + 1 == train.gradient_accumulation)
            loss = captured(self.samples, micro_batch == 0) if captured else self._gradients(self.samples)
            ranks.add(loss)
        ranks.collect_gradients(self.masters)
        sums = ranks.sums(None, RankRequests())
        return self.optimizer.step(_LR, sums.loss, self._not_blocked)

    def one_micro_batch(self) -> Tensor:
        """Run a step of one micro-batch, kernel by kernel."""
        self.begin_step()
        return self.optimizer.step(_LR, self._gradients(self.samples), self._not_blocked)

    def begin_step(self) -> None:
        """Begin the first micro-batch of a step."""
        set_step(self.model, next(self._steps))

    def _gradients(self, samples: Tensor) -> Tensor:
        train = self.config.train
        with deterministic(train.deterministic, self.device.type):
            summed, _ = self.model.loss(samples[:, :-1], samples[:, 1:])
            loss = summed / train.tokens_per_step
            loss.backward()
        return loss.detach()
