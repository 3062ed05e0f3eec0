"""Which ranks computed wrong bits, from the digests of what all of them computed twice."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class CorruptionError(RuntimeError):
    """A device computed different bits than before, or than other devices."""


class Mismatch(NamedTuple):
    """What differs. ranks: those at fault, empty without a majority; where: the first difference."""

    ranks: tuple[int, ...]
    where: str


def find_mismatch(
    digests: Tensor, tensor: int, devices_differ: bool, names: Sequence[str]
) -> Mismatch | None:
    """What differs, if anything does.

    digests: int64 [ranks, 2, k] of the two computations: the loss, then the gradients of `names`. tensor:
    this many neighbouring ranks share layers, and compute different parts. devices_differ: ranks may have
    different bits, so each is compared with itself only. A rank is at fault if its two computations differ,
    or if they differ from more than half of all.
    """
    rows = [[tuple(run) for run in rank] for rank in digests.tolist()]
    count = len(rows) if devices_differ else tensor
    at_fault: set[int] = set()
    places: set[int] = set()
    for first in range(count):
        ranks = range(first, len(rows), count)
        found = Counter(run for rank in ranks for run in rows[rank])
        (usual, times), *others = found.most_common()
        places |= {place for other in others for place, value in enumerate(other[0]) if value != usual[place]}
        for rank in ranks:
            outvoted = 2 * times > found.total() and usual not in rows[rank]
            if rows[rank][0] != rows[rank][1] or outvoted:
                at_fault.add(rank)
    if not places:
        return None
    # in the order of computation: the loss, then gradients from the last parameter to the first
    where = "in the loss" if 0 in places else f"first in the gradient of {names[max(places) - 1]}"
    return Mismatch(tuple(sorted(at_fault)), where)
