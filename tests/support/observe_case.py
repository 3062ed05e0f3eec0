"""The kernel that adds observations to the recipe state, against the operator's torch source.

Run as a program in Triton's interpreter: TRITON_INTERPRET=1 python -m support.observe_case
"""

import sys

import torch

from fourbits.linear import amax_policy as amax
from support.triton_interpreter import prepare


def recipe_state():
    return torch.full((3, 6, 4), -1.0), torch.zeros(3, 6, 8, dtype=torch.int64)


def main() -> int:
    """Observe two micro-batches with the kernel and in torch. 1 if anything differs."""
    prepare()
    (amaxes, counters), (true_amaxes, true_counters) = recipe_state(), recipe_state()
    counts = torch.arange(16).reshape(4, 4)
    for own in ([1.5, float("nan"), float("inf"), 0.0], [0.5, 2.0, -1.0, float("nan")]):
        observed = torch.tensor(own)
        amax.observe(amaxes, counters, observed, counts, 1, 2)
        pending = true_amaxes[1, 2:, amax.PENDING]
        pending[:] = pending.maximum(observed.nan_to_num(nan=-1.0, posinf=-1.0))
        true_counters[1, 2:, amax.RUNNING :] += counts
    assert true_amaxes[1, 2:, amax.PENDING].tolist() == [1.5, 2.0, -1.0, 0.0]
    return int(not (torch.equal(amaxes, true_amaxes) and torch.equal(counters, true_counters)))


if __name__ == "__main__":
    sys.exit(main())
