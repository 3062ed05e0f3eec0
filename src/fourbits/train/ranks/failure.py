"""Errors of one rank among several."""

import platform

#: the key of the store that the first rank to fail claims
FAILED = "failed"


class OtherRankError(RuntimeError):
    """Another rank failed and reports why; this one only ends."""


class LostRankError(RuntimeError):
    """Ranks ended without an error, as after SIGKILL."""


class RankFailedError(RuntimeError):
    """A rank of several failed; __cause__ is its error. reports: whether this rank reports it.

    others: a line for each rank that failed at the same time, by an error of its own.
    """

    def __init__(self, rank: int, reports: bool, error: BaseException, others: tuple[str, ...] = ()) -> None:
        self.subject = f"rank {rank} on {platform.node()}: "
        super().__init__(f"{self.subject}{error}")
        self.rank, self.reports, self.others = rank, reports, others
