"""The watchdog finds the rank that is gone, and the one that keeps others waiting."""

import pytest
from torch._C._distributed_c10d import HashStore

from fourbits.train.ranks import watchdog as watch_module
from fourbits.train.ranks.failure import FAILED
from fourbits.train.ranks.watchdog import WAITING, Watchdog


@pytest.fixture
def store(monkeypatch):
    """Of three ranks, on nodes a, b and c."""
    found = HashStore()
    for rank, node in enumerate("abc"):
        found.set(f"here/{rank}", node)
    return found


@pytest.fixture
def beating(store, monkeypatch):
    """While the watchdog waits for heartbeats, these ranks send them."""
    ranks = []
    monkeypatch.setattr(watch_module.time, "sleep", lambda _: [store.add(f"beat/{r}", 1) for r in ranks])
    return ranks


def test_ranks_without_heartbeats_are_reported_as_gone(store, beating):
    beating += [1]
    assert Watchdog(store, 0, 3, 1.0).gone() == [2]


def test_a_stopped_rank_is_named_with_its_node(store, beating):
    beating += [1]
    store.set("stuck/0", WAITING)
    store.set("stuck/1", WAITING)
    assert "rank 2 on c does not respond" in Watchdog(store, 0, 3, 1.0).verdict()


def test_a_rank_that_does_something_else_is_named_with_the_line(store, beating):
    beating += [1, 2]
    for rank, text in enumerate((WAITING, "in data.py:7", WAITING)):
        store.set(f"stuck/{rank}", text)
    verdict = Watchdog(store, 0, 3, 5.0).verdict()
    assert "no progress for 5 s (parallel.timeout): rank 1 on b hangs in data.py:7. The run ends" in verdict


def test_a_rank_without_progress_ends_after_the_timeout_and_the_first_one_says_why(
    store, beating, monkeypatch, caplog
):
    clock = [100.0]
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: clock[0])
    beating += [0, 1, 2]
    watches, left = [Watchdog(store, rank, 3, 5.0) for rank in range(3)], []

    def look():
        for rank, watch in enumerate(watches):
            watch._look(lambda code, rank=rank: left.append((rank, code)))

    look()  # nothing is watched before the first progress, as while text is prepared
    for watch in watches:
        watch.progress()
    clock[0] += 4
    watches[1].progress()
    clock[0] += 2
    look()
    assert left == [(0, 1)]
    assert store.check([FAILED])
    assert len(caplog.messages) == 1
    assert "rank 0" in caplog.messages[0]
    clock[0] += 11
    look()
    assert {rank for rank, _ in left} == {0, 1, 2}
    assert len(caplog.messages) == 1


class Silent(HashStore):
    """A store that does not answer."""

    def add(self, key, value):
        raise RuntimeError("failed to recv, got 0 bytes")


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_whose_launcher_is_gone_says_so_and_ends_unless_it_has_by_then(ends, monkeypatch, caplog):
    watch, left = Watchdog(Silent(), 1, 2, 5.0), []
    waits = iter([False, ends, True])
    monkeypatch.setattr(watch._ended, "wait", lambda _: next(waits))
    monkeypatch.setattr(watch_module.os, "_exit", left.append)
    watch._run()
    assert left == ([] if ends else [1])
    assert len(caplog.messages) == len(left)
    assert all("rank 1 on" in text and "lost the launcher" in text for text in caplog.messages)


def test_a_thread_in_a_collective_waits_and_another_is_at_its_line(store):
    watch = Watchdog(store, 0, 3, 1.0)
    assert f"in {__file__}" in watch._doing() or "watchdog.py" in watch._doing()
    frame = compile("def wait(do): return do()", "/site/torch/distributed/distributed_c10d.py", "exec")
    names = {}
    exec(frame, names)
    assert names["wait"](watch._doing) == WAITING
