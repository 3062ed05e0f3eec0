"""The errors of one rank among several."""

import platform

#: the key of the store that the first rank to fail claims
FAILED = "failed"


class OtherRankError(RuntimeError):
    """Another rank failed, which says why; this one only ends."""


class LostRankError(RuntimeError):
    """Ranks ended without an error, as after SIGKILL."""


class RankFailedError(RuntimeError):
    """A rank of several failed; __cause__ is its error. speaks: whether this rank reports it."""

    def __init__(self, rank: int, speaks: bool, error: BaseException) -> None:
        self.subject = f"rank {rank} on {platform.node()}: "
        super().__init__(f"{self.subject}{error}")
        self.rank, self.speaks = rank, speaks
