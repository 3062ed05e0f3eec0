"""`fourbits train`, of which rank 1 fails in its third step by an error of its own."""

import os
from typing import Any

from fourbits.cli.main import main
from fourbits.train.trainer import Trainer

_step = Trainer.run_step


def run_step(self: Trainer) -> Any:
    if self.step == 2 and os.environ["RANK"] == "1":
        raise KeyError("a batch without labels")
    return _step(self)


if __name__ == "__main__":
    Trainer.run_step = run_step
    raise SystemExit(main())
