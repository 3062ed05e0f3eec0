"""What every test may rely on: two threads, fixed seeds, and no GPU test where there is no GPU.

Tests of peers run on request only (`make test-peers`), because they need packages that nothing else does;
slow ones, sweeps of minutes, with them.
"""

import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(2)

# nohup and shells' background jobs ignore these, and so would the processes that tests start
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# The same examples on every machine, and no time limit: what a test claims does not depend on a busy CPU.
settings.register_profile("fourbits", derandomize=True, deadline=None, database=None)
settings.load_profile("fourbits")


@pytest.fixture(autouse=True)
def fixed_seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [] if torch.cuda.is_available() else ["gpu"]
    left_out += [marker for marker in ("peers", "slow") if marker not in config.option.markexpr]
    deselected = [item for item in items if any(map(item.get_closest_marker, left_out))]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in set(deselected)]
