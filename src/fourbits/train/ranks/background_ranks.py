"""The ranks as a background thread uses them: by a separate connection to the store and a group on CPUs."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from fourbits.train.ranks.agreement import Agreements

T = TypeVar("T")


class SavingRanks(Protocol):
    """The part of the ranks' interface that the writer of a checkpoint needs."""

    @property
    def rank(self) -> int:
        """The rank of this process."""
        ...

    @property
    def is_first(self) -> bool:
        """Whether this process writes the metadata of a checkpoint."""
        ...

    @property
    def group(self) -> Any:
        """The process group for messages on CPUs; None for that of training."""
        ...

    def agreed(self, decide: Callable[[], T]) -> T:
        """The decision of rank 0."""
        ...

    def gathered(self, value: T) -> list[T]:
        """The plain value of each rank."""
        ...

    def progress(self) -> None:
        """Report progress: this rank has done something that others may wait for."""
        ...


class BackgroundRanks:
    """The same ranks for another thread. All ranks must create it together."""

    def __init__(
        self, store: Any, rank: int, world: int, timeout: timedelta, progress: Callable[[], None]
    ) -> None:
        """store: the thread's own connection; timeout: of messages."""
        self.rank, self.is_first, self.progress = rank, rank == 0, progress
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self._world = world
        self._agreements = Agreements(store, self.is_first, "apart")

    def agreed(self, decide: Callable[[], T]) -> T:
        """The decision of rank 0."""
        return self._agreements.agreed(decide)

    def gathered(self, value: T) -> list[T]:
        """The plain value of each rank."""
        return gathered(value, self._world, self.group)


def gathered(value: T, world: int, group: Any) -> list[T]:
    """The plain value of each rank of a group."""
    found: list[Any] = [None] * world
    dist.all_gather_object(found, value, group=group)
    return found
