"""Errors of one rank among several, and the keys under which the launcher's store has them."""

import platform

#: the key of the store that the first rank to fail claims
FAILED = "failed"


def ended(rank: int) -> str:
    """The key under which a rank stores its error, before it ends."""
    return f"ended/{rank}"


def may_be_connection(error: BaseException) -> bool:
    """Whether this may be a broken connection, for which PyTorch has no separate type."""
    return isinstance(error, RuntimeError) and not type(error).__module__.startswith("fourbits.")


class OtherRankError(RuntimeError):
    """Another rank failed and reports why; this one only ends."""


class MissingRankError(TimeoutError):
    """Ranks did not start in time, or the store in which they meet could not be reached."""


class LostRankError(RuntimeError):
    """Ranks ended without an error, as after SIGKILL."""


class RankFailedError(RuntimeError):
    """A rank of several failed; __cause__ is its error. reports: whether this rank reports it.

    others: a line for each rank that failed at the same time with a separate error.
    """

    def __init__(self, rank: int, reports: bool, error: BaseException, others: tuple[str, ...] = ()) -> None:
        self.subject = f"rank {rank} on {platform.node()}: "
        super().__init__(f"{self.subject}{error}")
        self.rank, self.reports, self.others = rank, reports, others
