"""A function that fails as its argument says, importable by spawned processes."""

import os
import signal
import time

import torch


def behave(how: str) -> tuple[int, int]:
    """The process and its number of threads, unless it is killed, exits, hangs or raises."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        os._exit(3)
    if how == "hangs":
        time.sleep(600)
    if how == "raises":
        raise torch.OutOfMemoryError("no memory left")
    return os.getpid(), torch.get_num_threads()
