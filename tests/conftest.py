"""What every test may rely on: two threads, fixed seeds, and no GPU test where there is no GPU."""

import random

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(2)

# The same examples on every machine, and no time limit: what a test claims does not depend on a busy CPU.
settings.register_profile("fourbits", derandomize=True, deadline=None, database=None)
settings.load_profile("fourbits")


@pytest.fixture(autouse=True)
def fixed_seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=needs_gpu)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
