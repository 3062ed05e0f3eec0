"""An evaluation that several processes share: each has the whole model and its part of the work."""

from typing import Any

from fourbits.train.ranks.alone import Ranks


class HarnessRanks:
    """Ranks as lm-evaluation-harness asks them; see `fourbits.harness.adapter.Ranks`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.rank, self.world_size = ranks.rank, ranks.world

    def all_gather(self, tensor: Any) -> Any:
        """The tensors of all ranks, concatenated."""
        return self._ranks.all(tensor.flatten()).flatten()

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all ranks, on rank dst."""
        found = self._ranks.gathered(obj)
        return found if self.rank == dst else None

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._ranks.gathered(None)
