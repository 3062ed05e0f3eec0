"""Data that a run does not survive: the loss of a step on it spikes, or a gradient is not finite.

As a script it trains on such data: `spiking.py KIND train CONFIG --out DIR`, also under torchrun.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

from fourbits.cli.main import main
from fourbits.train import spikes
from fourbits.train.trainer import Trainer

#: which step's data, of a run that leaves out none
SPIKE = 9
SPIKED, INFINITE = "spike", "infinite"


def inject(setattr: Callable[[Any, str, Any], None], kind: str, bad: Callable[[int, int], bool]) -> None:
    """bad: for the step that the data were meant for, and the step that reads them, both 1 for the first."""
    accumulate = Trainer._accumulate_gradients

    def accumulated(trainer: Trainer) -> Any:
        loss, step = accumulate(trainer), trainer.step + 1
        if not bad(step + trainer.rollbacks.data_offset, step):
            return loss
        if kind == SPIKED:
            return 100 * loss
        trainer.masters["norm.weight"].grad.fill_(math.inf)  # pyright: ignore[reportOptionalMemberAccess]
        return loss

    setattr(spikes, "FEWEST", 4)
    setattr(Trainer, "_accumulate_gradients", accumulated)


def of_data(data: int, step: int) -> bool:
    """Bad data, wherever they are read."""
    return data == SPIKE


if __name__ == "__main__":
    inject(setattr, sys.argv[1], of_data)
    sys.exit(main(sys.argv[2:]))
