"""A user who waits for compilers is told once, and told when they have ended."""

import logging
import time

import pytest

from fourbits.compile_notice import Burst

#: far from each other, and from what a busy machine adds
PATIENCE, QUIET = 0.2, 0.4


def compile_for(burst, seconds, name="a kernel"):
    with burst.compiling(name):
        time.sleep(seconds)


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.WARNING, "fourbits")
    return lambda: [record.getMessage() for record in caplog.records]


def wait_for(messages, count):
    deadline = time.monotonic() + 30
    while len(messages()) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return messages()


def test_a_long_compilation_is_announced_while_it_runs_and_reported_after_it(messages):
    burst = Burst(PATIENCE, QUIET)
    with burst.compiling("exact_kernel"):
        (announced,) = wait_for(messages, 1)
    assert "now exact_kernel" in announced
    assert wait_for(messages, 2)[1].startswith("fourbits: compiled 1 kernel in ")


def test_short_compilations_in_a_row_count_together(messages):
    burst = Burst(PATIENCE, QUIET)
    for _ in range(6):
        compile_for(burst, 0.6 * PATIENCE)
    assert len(wait_for(messages, 2)) == 2
    assert "compiled 6 kernels" in messages()[1]


def test_what_takes_less_than_a_user_notices_is_not_reported(messages):
    burst = Burst(60.0, 0.05)
    compile_for(burst, 0.0)
    time.sleep(0.2)
    compile_for(burst, 0.0)
    time.sleep(0.2)
    assert messages() == []


def test_an_error_ends_a_compilation(messages):
    def fail():
        with burst.compiling("a kernel"):
            wait_for(messages, 1)
            raise RuntimeError

    burst = Burst(PATIENCE, QUIET)
    with pytest.raises(RuntimeError):
        fail()
    assert "compiled 1 kernel in" in wait_for(messages, 2)[1]
