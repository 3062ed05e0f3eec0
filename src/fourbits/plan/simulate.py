"""A long run as a sequence of events: steps that wait for the slowest GPU, failures, checkpoints, restarts.

Seeded, so that a simulation can be repeated. Where a closed form exists (failures at a constant rate without
stragglers: failures.py), the mean over seeds agrees with it.
"""

import random
import statistics
from dataclasses import dataclass, replace

from fourbits.plan.estimate import Plan
from fourbits.plan.failures import Failures

SEEDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What happens to a run.

    step: seconds without disturbance; steps: of the whole run; interval: steps between checkpoints. jitter:
    standard deviation of one GPU's step time, as a share of it. slow: GPUs that are slow at any time;
    slowdown: their step time over that of others.
    """

    step: float
    steps: int
    interval: int
    gpus: int
    failures: Failures
    jitter: float = 0.0
    slow: int = 0
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "interval", "gpus"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}. Take it from a plan, as "
                    "cluster_of does."
                )
        if self.step <= 0:
            raise ValueError(
                f"step must be above 0 seconds, got {self.step}. Take it from a plan, as cluster_of does."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Seconds of a simulated run, by what they went to; failures: how many there were."""

    computing: float
    waiting: float
    repeated: float
    checkpoints: float
    restarts: float
    failures: int

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return self.computing + self.waiting + self.repeated + self.checkpoints + self.restarts


def cluster_of(plan: Plan) -> Cluster:
    """A planned run with checkpoints at the best interval."""
    step, steps = plan.estimate.step_seconds, plan.config.train.num_steps
    return Cluster(
        step=step,
        steps=steps,
        interval=plan.failures.best_steps(step, steps),
        gpus=plan.estimate.choice.layout.gpus,
        failures=plan.failures,
    )


def simulate(cluster: Cluster, seed: int = 0) -> Outcome:
    """Simulate one run, from checkpoint to checkpoint, so that a run of a million steps is quick."""
    generator = random.Random(seed)
    done, now, next_failure = 0, 0.0, _time_to_failure(cluster, generator)
    computing = waiting = repeated = checkpoints = restarts = 0.0
    failed = 0
    while done < cluster.steps:
        steps = min(cluster.interval, cluster.steps - done)
        ideal = steps * cluster.step
        piece = ideal * slowest(cluster)
        save = cluster.failures.checkpoint
        if now + piece + save <= next_failure:
            done, now = done + steps, now + piece + save
            computing, waiting, checkpoints = computing + ideal, waiting + piece - ideal, checkpoints + save
            continue
        repeated += max(0.0, next_failure - now)
        failed, now = failed + 1, next_failure
        while True:  # a restart may fail, too
            next_failure = now + _time_to_failure(cluster, generator)
            if now + cluster.failures.restart <= next_failure:
                break
            restarts, failed, now = restarts + next_failure - now, failed + 1, next_failure
        restarts, now = restarts + cluster.failures.restart, now + cluster.failures.restart
    return Outcome(
        computing=computing,
        waiting=waiting,
        repeated=repeated,
        checkpoints=checkpoints,
        restarts=restarts,
        failures=failed,
    )


def slowest(cluster: Cluster) -> float:
    """The expected step time over the undisturbed one: that of the slowest GPU.

    The maximum of N normal numbers is at about Phi^-1(N / (N + 1)), here of the slow GPUs and of the others.
    """
    others = 1 + cluster.jitter * _largest(cluster.gpus - cluster.slow)
    slow = cluster.slowdown * (1 + cluster.jitter * _largest(cluster.slow)) if cluster.slow else 0.0
    return max(others, slow)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What a change of one assumption does to the mean time of a run."""

    what: str
    seconds: float
    change: float


def sensitivity(cluster: Cluster, seeds: int = SEEDS) -> list[Sensitivity]:
    """The run as assumed, and with each assumption changed; means over seeds."""
    of = cluster.failures
    changed = {
        "as assumed": cluster,
        "failures twice as often": replace(cluster, failures=replace(of, between=of.between / 2)),
        "restarts twice as long": replace(cluster, failures=replace(of, restart=2 * of.restart)),
        "checkpoints twice as slow": replace(cluster, failures=replace(of, checkpoint=2 * of.checkpoint)),
        "checkpoints four times as rare": replace(cluster, interval=4 * cluster.interval),
        "one GPU at 0.9 of its speed": replace(cluster, slow=1, slowdown=1 / 0.9),
        "step times of a GPU vary by 2 %": replace(cluster, jitter=0.02),
    }
    means = {
        what: statistics.mean(simulate(each, seed).total for seed in range(seeds))
        for what, each in changed.items()
    }
    base = means["as assumed"]
    return [Sensitivity(what, seconds, seconds / base - 1) for what, seconds in means.items()]


def _time_to_failure(cluster: Cluster, generator: random.Random) -> float:
    return generator.expovariate(1 / cluster.failures.between)


def _largest(count: int) -> float:
    return statistics.NormalDist().inv_cdf(count / (count + 1)) if count > 1 else 0.0
