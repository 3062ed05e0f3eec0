"""A program for ranks that meet and then fail, each as its argument says; prints what a rank reports."""

import sys
import time

from fourbits.train.parallel import ParallelConfig
from fourbits.train.ranks.failure import RankFailedError
from fourbits.train.ranks.join import joined

ERRORS = {
    "kernel": RuntimeError("an illegal memory access was encountered"),
    "disk": OSError(28, "No space left on device"),
    "setting": ValueError("train.steps: must be positive"),
}


def main() -> None:
    try:
        with joined(ParallelConfig(), "cpu") as ranks:
            ranks.agreed(lambda: 0)
            time.sleep(0.1)
            raise ERRORS[sys.argv[1 + ranks.rank]]
    except RankFailedError as failure:
        if failure.reports:
            print(failure, *failure.others, sep="\n", flush=True)


if __name__ == "__main__":
    main()
