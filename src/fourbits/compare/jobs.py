"""How many runs of a comparison are made at a time, and on how many CPU threads each."""

from dataclasses import dataclass

import torch

from fourbits.compare.plan import Plan
from fourbits.device import probe
from fourbits.model.counts import count_parameters

# Steps of a smaller model are bound by serial Python, which a second thread does not shorten and a second
# process does; a larger one fills all threads by itself, and its memory would be needed several times.
SMALL_MODEL = 10_000_000
# By default; each process holds torch, a model and its compiled code, about 0.6 GB for the demo's.
MOST_AT_A_TIME = 4


@dataclass(frozen=True, slots=True)
class Jobs:
    """at_a_time: runs that are made side by side; threads: CPU threads that each computes on."""

    at_a_time: int
    threads: int


def choose_jobs(plan: Plan, asked: int | None = None) -> Jobs:
    """What --jobs means for a plan. asked: None for the rule that the help of `fourbits compare` states.

    It depends on the plan and the machine, not on what is done already, so that a comparison continues on
    as many threads as it began. Raises ValueError for less than one run at a time.
    """
    config = plan.runs[0].config
    cores = torch.get_num_threads()
    if asked is not None and asked < 1:
        raise ValueError(f"--jobs must be at least 1, got {asked}.")
    wanted = asked or 1
    if asked is None and _is_small(plan) and _on_cpu(config.train.device):
        wanted = max(1, min(MOST_AT_A_TIME, cores // (config.train.threads or 1)))
    at_a_time = min(wanted, len(plan.runs))
    return Jobs(at_a_time, config.train.threads or max(1, cores // at_a_time))


def _is_small(plan: Plan) -> bool:
    return count_parameters(plan.runs[0].config.model)["linear"] <= SMALL_MODEL


def _on_cpu(device: str) -> bool:
    return probe(None if device == "auto" else device).kind == "cpu"
