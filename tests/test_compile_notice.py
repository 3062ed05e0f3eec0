"""A wait for compilers is announced once, and its end is reported."""

import logging

import pytest

from fourbits.compile_notice import Burst


class Clock:
    """Time that passes when a test says so, and the timers that go off in it."""

    def __init__(self):
        self.now, self.timers = 0.0, []

    def timer(self, seconds, call, arguments):
        return Timer(self, self.now + seconds, lambda: call(*arguments))

    def wait(self, seconds):
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.at <= self.now]:
            self.timers.remove(timer)
            timer.call()


class Timer:
    def __init__(self, clock, at, call):
        self.clock, self.at, self.call = clock, at, call

    def start(self):
        self.clock.timers.append(self)

    def cancel(self):
        if self in self.clock.timers:
            self.clock.timers.remove(self)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def burst(clock):
    return Burst(lambda: clock.now, clock.timer)


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.WARNING, "fourbits")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_long_compilation_is_announced_while_it_runs_and_reported_after_it(burst, clock, messages):
    with burst.compiling("exact_kernel"):
        clock.wait(1.4)
        assert messages() == []
        clock.wait(0.2)
        (announced,) = messages()
        assert "compiling kernels (exact_kernel)" in announced
        clock.wait(3.0)
    clock.wait(1.9)
    assert messages() == [announced]
    clock.wait(0.2)
    assert messages() == [announced, "fourbits: compiled 1 kernel in 4.6 s."]


def test_short_compilations_in_a_row_count_together(burst, clock, messages):
    for _ in range(4):
        with burst.compiling("a kernel"):
            clock.wait(0.5)
        clock.wait(1.0)
    clock.wait(2.0)
    announced, reported = messages()
    assert "compiling kernels" in announced
    assert reported == "fourbits: compiled 4 kernels in 2.0 s."


def test_what_takes_less_than_a_user_notices_is_not_reported(burst, clock, messages):
    for _ in range(3):
        with burst.compiling("a kernel"):
            clock.wait(1.0)
        clock.wait(5.0)
    assert messages() == []


def test_an_error_ends_a_compilation(burst, clock, messages):
    def fail():
        with burst.compiling("a kernel"):
            clock.wait(2.0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    clock.wait(3.0)
    assert messages()[1] == "fourbits: compiled 1 kernel in 2.0 s."


def test_of_several_processes_of_a_node_one_says_it(burst, clock, messages, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with burst.compiling("a quantizer"):
        clock.wait(3.0)
    clock.wait(3.0)
    assert messages() == []
