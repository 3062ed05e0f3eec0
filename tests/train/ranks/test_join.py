"""Of several ranks that fail, one reports it."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from fourbits.train.non_finite import NonFiniteError
from fourbits.train.parallel import ParallelConfig
from fourbits.train.ranks import join
from fourbits.train.ranks.failure import FAILED, LostRankError, OtherRankError, RankFailedError, ended
from fourbits.train.ranks.join import joined
from fourbits.train.ranks.launcher import launched_rank
from fourbits.train.ranks.watchdog import Watchdog
from support.torchrun import PATIENCE, environment
from train.ranks import failing


class Lost(Watchdog):
    """A watchdog that finds these ranks gone, or, with None, that the store is gone."""

    def __init__(self, store, *ranks):
        super().__init__(store, 0, 5, 1.0)
        self.ranks = list(ranks)

    def gone(self):
        if self.ranks == [None]:
            raise RuntimeError("failed to recv, got 0 bytes")
        return self.ranks

    def node_of(self, rank):
        return f"node{rank}"


def test_only_the_first_rank_to_fail_reports_its_error():
    store = HashStore()
    assert join._may_report(store, 1, OSError("disk full"))
    assert not join._may_report(store, 0, RuntimeError("connection closed"))


def test_a_rank_that_fails_because_of_another_reports_nothing():
    store = HashStore()
    assert not join._may_report(store, 0, OtherRankError("another rank failed"))
    assert not store.check([FAILED])


@pytest.mark.parametrize("error", [ValueError("a setting"), NonFiniteError("step 3")])
def test_an_error_of_all_ranks_is_reported_by_rank_0(error, monkeypatch):
    store = HashStore()
    monkeypatch.setattr(join.time, "sleep", lambda _: store.add(FAILED, 1))
    assert not join._may_report(store, 1, error)


def test_a_broken_connection_is_explained_by_the_ranks_that_are_gone():
    broken = RuntimeError("Connection closed by peer")
    store = HashStore()
    found = Lost(store, 1, 3).explained(broken)
    assert isinstance(found, LostRankError)
    assert str(found).startswith("lost rank 1 on node1, 3 on node3: not responding")
    assert found.__cause__ is broken
    assert Lost(store).explained(broken) is broken
    assert str(Lost(store, None).explained(broken)).startswith("lost the launcher: its store does not answer")
    for own in (found, OSError("disk full"), NonFiniteError("step 3")):
        assert Lost(store, 1).explained(own) is own


def test_an_error_is_explained_once(monkeypatch):
    """By the run, for its summary, before the launcher gets the error."""
    watch, own = Lost(HashStore()), RuntimeError("an illegal memory access")
    assert watch.explained(own) is own
    monkeypatch.setattr(watch, "gone", lambda: pytest.fail("waited again"))
    assert watch.explained(own) is own


def test_a_rank_that_failed_by_itself_is_not_lost_and_its_error_is_named():
    store, broken = HashStore(), RuntimeError("an illegal memory access")
    assert not join._may_report(store, 3, OtherRankError("another rank failed"))
    assert join._may_report(store, 0, broken)
    assert not join._may_report(store, 1, OSError("disk full"))
    assert not join._may_report(store, 2, RuntimeError("Connection closed by peer"))
    assert not join._may_report(store, 4, LostRankError("lost rank 1"))
    assert Lost(store, 1, 2).explained(broken) is broken
    store.set(
        ended(3), store.get(ended(0)).decode()
    )  # failed alike, before the first one had claimed the report
    assert join._others(store, Lost(store)) == ("rank 1 on node1 failed, too: OSError: disk full",)


BROKEN = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")


@pytest.mark.parametrize("error", [KeyError("labels"), ValueError("all ranks raise such")], ids=str)
def test_a_broken_connection_is_explained_by_the_error_of_the_rank_that_ended(error, monkeypatch):
    store = HashStore()
    monkeypatch.setattr(join.time, "sleep", lambda _: store.add(FAILED, 1))
    join._may_report(store, 1, BROKEN)  # as that of rank 0
    join._may_report(store, 2, error)
    found = Lost(store, 1, 2).explained(BROKEN)
    assert isinstance(found, OtherRankError)
    assert str(found) == f"rank 2 on node2 failed: {type(error).__name__}: {error}"
    assert found.__cause__ is BROKEN


@pytest.mark.parametrize(
    ("errors", "lines"),
    [
        (("kernel", "kernel"), {"an illegal memory access was encountered"}),
        (
            ("kernel", "disk"),
            {"an illegal memory access was encountered", "[Errno 28] No space left on device"},
        ),
        (("setting", "setting"), {"train.steps: must be positive"}),
    ],
    ids=["kernels", "kernel and disk", "settings"],
)
def test_two_ranks_that_fail_at_once_are_named_with_their_own_errors(errors, lines):
    """Not each as lost to the other, which had only ended after its own error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [str(Path(failing.__file__)), *errors]
    ended = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=PATIENCE, env=environment()
    )
    reported = [line for line in ended.stdout.splitlines() if line.startswith("rank ")]
    assert reported, ended.stderr
    found = {line for line in lines if any(text.endswith(line) for text in reported)}
    assert found
    assert all(any(text.endswith(line) for line in lines) for text in reported)
    assert len({text.split(" on ")[0] for text in reported}) == len(reported)


def test_a_process_without_a_launcher_is_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launched_rank() is None
    with joined(ParallelConfig(), "cpu") as ranks:
        assert (ranks.alone, ranks.rank, ranks.world, ranks.agreed(lambda: 3)) == (True, 0, 1, 3)


def test_ranks_are_read_from_the_environment_of_torchrun():
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert launched_rank(given) == (5, 8, 1, 0, False, "a", 1, False)
    restarted = {**given, "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert launched_rank(restarted) == (5, 8, 1, 2, True, "a", 1, False)
    first = {**given, "RANK": "0"}
    hosting, hosted = launched_rank(first), launched_rank({**first, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert hosting is not None
    assert hosted is not None
    assert (hosting.hosts_store, hosted.hosts_store) == (True, False)


@pytest.fixture
def started(monkeypatch):
    """Start this process as a rank of two, of a launcher without a store; the error that ends it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start(rank, timeout):
        given = {
            "RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(RankFailedError) as error, joined(ParallelConfig(timeout=timeout), "cpu"):
            pass
        return error.value

    return start, port


def test_rank_0_names_a_rank_that_does_not_start(started):
    start, _ = started
    error = start(0, 0.5)
    assert error.reports
    assert "rank 1 of 2 did not start within 0.5 s (parallel.timeout)" in str(error)


def test_without_rank_0_the_first_rank_to_notice_names_it(started):
    start, port = started
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    first, second = start(1, 0.5), start(1, 0.5)
    assert "rank 0 of 2 did not start within 0.5 s" in str(first)
    assert (first.reports, second.reports) == (True, False)
    assert store.get("late/0") == b"2"


def test_a_store_that_cannot_be_reached_is_named_with_its_address(started):
    start, port = started
    error = start(1, 1)
    assert error.reports
    assert f"127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT), could not be reached within 1 s" in str(error)
