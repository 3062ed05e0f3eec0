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


def why(rank: int) -> str:
    """The key under which a rank stores its own error in one line; empty if other ranks caused it."""
    return f"why/{rank}"


def line_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def is_broken_connection(error: BaseException) -> bool:
    """Whether an error says that a connection broke: gloo's by its text, NCCL's by its type."""
    kind = type(error).__name__
    return may_be_connection(error) and ("gloo/transport" in str(error) or kind.startswith("Dist"))


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
