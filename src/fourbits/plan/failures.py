"""Failures and checkpoints: the best interval between checkpoints, and the share of the time that is lost.

J. W. Young, 1974, and J. T. Daly, 2006: with failures at a constant rate, a run of pieces of length t, each
followed by a checkpoint that takes d, and restarts that take r, needs on average

    M exp(r / M) (exp((t + d) / M) - 1)

per piece, where M is the mean time between failures.
"""

import math
from dataclasses import dataclass

#: hours between failures of one GPU: 419 interruptions of 16,384 GPUs in 54 days (arXiv:2407.21783, 3.3.4)
HOURS_BETWEEN_FAILURES = 16384 * 54 * 24 / 419
#: masters and both moments, FP32
CHECKPOINT_BYTES = 12
#: assumed: seconds of a restart, bytes/s that all ranks together write, and that a GPU copies to its host
RESTART_SECONDS, STORAGE_RATE, HOST_RATE = 600.0, 10e9, 25e9
#: failures per interval whose exponential is close to the largest float
_NEVER = 700.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Seconds: between failures of the whole cluster, of a restart, of a checkpoint."""

    between: float
    restart: float
    checkpoint: float

    @property
    def best_interval(self) -> float:
        """Daly's interval of computation between checkpoints, which refines Young's sqrt(2 d M)."""
        d, m = self.checkpoint, self.between
        if d >= 2 * m:
            return m
        ratio = math.sqrt(d / (2 * m))
        return math.sqrt(2 * d * m) * (1 + ratio / 3 + ratio**2 / 9) - d

    def slowdown(self, interval: float) -> float:
        """Expected time over the time of computation alone, with this many seconds between checkpoints.

        Infinite where hundreds of failures are expected in one interval: such a run never ends.
        """
        m = self.between
        if (interval + self.checkpoint + self.restart) / m > _NEVER:
            return math.inf
        piece = m * math.exp(self.restart / m) * math.expm1((interval + self.checkpoint) / m)
        return piece / interval

    def lost(self, interval: float) -> float:
        """The share of the expected time that failures and checkpoints take."""
        return 1 - 1 / self.slowdown(interval)

    def best_steps(self, step: float, steps: int) -> int:
        """The best interval in steps of this many seconds, at most the `steps` of the whole run."""
        return min(max(1, round(self.best_interval / step)), steps)


def failures_of(
    gpus: int,
    parameters: float,
    hours_between: float = HOURS_BETWEEN_FAILURES,
    storage: float = STORAGE_RATE,
    background: bool = False,
) -> Failures:
    """The failures and checkpoints of a cluster.

    hours_between: of one GPU; storage: bytes per second of the whole run; background: whether training waits
    for a copy in the host's memory only.
    """
    rate = HOST_RATE * gpus if background else storage
    return Failures(
        between=hours_between * 3600 / gpus,
        restart=RESTART_SECONDS,
        checkpoint=CHECKPOINT_BYTES * parameters / rate,
    )
