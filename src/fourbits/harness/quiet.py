"""Disables progress bars of the harness and of datasets, which would draw hundreds, one per task."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from functools import partialmethod
from importlib import import_module
from typing import Any

from fourbits.data.optional import load_datasets


@contextmanager
def quiet() -> Generator[None]:
    """Inside the block, neither draws bars, and the harness logs errors only."""
    bar, datasets = import_module("tqdm").tqdm, load_datasets("tasks")
    logger = logging.getLogger("lm_eval")
    begin: Any = bar.__init__
    level, drawn = logger.level, datasets.is_progress_bar_enabled()
    bar.__init__ = partialmethod(begin, disable=True)
    datasets.disable_progress_bars()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        bar.__init__ = begin
        logger.setLevel(level)
        if drawn:
            datasets.enable_progress_bars()
