"""The machine that a plan is for."""

from dataclasses import dataclass

from fourbits.plan.gpus import Gpu
from fourbits.plan.memory import USABLE
from fourbits.plan.rates import Rates
from fourbits.plan.software import Software


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU, the rates it reaches, and the program that trains on it."""

    gpu: Gpu
    rates: Rates
    software: Software

    @property
    def usable_memory(self) -> float:
        """Bytes of a GPU that a plan may fill."""
        return USABLE * self.gpu.memory
