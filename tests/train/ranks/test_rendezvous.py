"""Ranks connect to those of the same start, and name the ones that are missing."""

import threading

import pytest
from torch._C._distributed_c10d import HashStore

from fourbits.train.ranks.rendezvous import rendezvous


def meeting(store, world):
    """What each of `world` ranks, as threads, gets."""
    found = {}
    threads = [
        threading.Thread(target=lambda r=rank: found.update({r: rendezvous(store, r, world, 30.0)}))
        for rank in range(world)
    ]
    for thread in reversed(threads):  # rank 0 is the last to start
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(world)]


def test_all_ranks_of_a_start_get_one_name_and_each_start_another():
    """The store still has the keys of the first start when the ranks are started again."""
    store = HashStore()
    first, second = meeting(store, 3), meeting(store, 3)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def late(store, rank):
    """The error of a rank of four when others are missing."""
    with pytest.raises(TimeoutError) as error:
        rendezvous(store, rank, 4, 0.3)
    return str(error.value)


def test_missing_ranks_are_named():
    store, errors = HashStore(), []
    other = threading.Thread(target=lambda: errors.append(late(store, 2)))
    other.start()
    errors.append(late(store, 0))
    other.join()
    for text in errors:
        assert text.startswith("rank 1, 3 of 4 did not start within 0.3 s (parallel.timeout)")


def test_without_rank_0_it_is_named():
    with pytest.raises(TimeoutError, match="rank 0 of 2 did not start"):
        rendezvous(HashStore(), 1, 2, 0.1)
