"""The numbers of a step: first on the device, later on the host."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fourbits.linear.monitor.health import Sampling
from fourbits.train.ranks.ranks import RankRequests
from fourbits.train.timing import Timestamp


@dataclass(frozen=True, slots=True)
class StepResult:
    """One finished step. step: 1 for the first. skipped: whether the update was skipped as not finite.

    data_seconds: host time spent reading the step's samples.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    skipped: bool
    data_seconds: float
    #: share of the blocks quantized in this step whose scale saturated; None if they are not counted
    saturated: float | None
    #: the threshold that the loss exceeds, if it is a spike
    spike_threshold: float | None
    #: requests to any of several ranks when the step began; none to a process that trains alone
    requests: RankRequests
    finished: Timestamp


class PendingStep:
    """A step whose numbers may not have arrived from the device yet."""

    def __init__(
        self, step: int, lr: float, data_seconds: float, numbers: Tensor, health: Sampling | None = None
    ) -> None:
        """Begin to copy a step's numbers to the host.

        numbers: requests, loss, spike threshold (NaN: no spike), share of saturated blocks, whether skipped,
        gradient norm, norm per parameter. health: a sample that was taken in the step.
        """
        self.health = health
        self.step, self.lr, self.data_seconds = step, lr, data_seconds
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, pin_memory=True, dtype=torch.float32, device="cpu")
            self._numbers.copy_(numbers, non_blocking=True)
        self._finished = Timestamp(numbers.device)

    @property
    def in_flight(self) -> bool:
        """Whether `wait` would block."""
        return not self._finished.reached

    def wait(self) -> tuple[StepResult, list[float]]:
        """Block until the numbers have arrived; return them and the gradient norm of each parameter."""
        self._finished.wait()
        signal, time_up, save, record, loss, spike, share, skipped, grad_norm, *norms = self._numbers.tolist()
        result = StepResult(
            self.step,
            loss,
            self.lr,
            grad_norm,
            skipped != 0,
            self.data_seconds,
            None if math.isnan(share) else share,
            None if math.isnan(spike) else spike,
            RankRequests(int(signal), bool(time_up), bool(save), bool(record)),
            self._finished,
        )
        return result, norms
