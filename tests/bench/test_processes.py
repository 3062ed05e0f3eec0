"""Calls in spawned processes: results, crashes, hangs, exceptions, and which process takes the next call."""

import os
import time

import pytest
import torch

from fourbits.bench.processes import Limits, Lost, call_in_processes
from support.misbehaving import behave

LONG = Limits(begin=120.0, end=120.0)


def test_a_crash_costs_its_own_call_only_and_says_how_the_process_ended():
    found = call_in_processes(behave, ["killed", "exits", "well"], 2, LONG)
    reasons = {name: result.reason for name, result in found.items() if isinstance(result, Lost)}
    assert reasons == {
        "killed": "its process was killed by SIGKILL",
        "exits": "its process ended with exit code 3",
    }
    process, threads = found["well"]
    assert process != os.getpid()
    assert threads >= 1


def test_a_call_that_hangs_ends_at_its_limit():
    start = time.monotonic()
    found = call_in_processes(behave, ["hangs"], 1, Limits(begin=60.0, end=1.0))["hangs"]
    assert isinstance(found, Lost)
    assert found.reason == "did not end within 1 s"
    assert time.monotonic() - start < 30


def test_calls_that_do_not_begin_in_time_have_no_result():
    assert list(call_in_processes(behave, ["a", "b"], 1, Limits(begin=0.0, end=120.0))) == ["a"]


def test_an_exception_is_raised_here():
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        call_in_processes(behave, ["raises"], 1, LONG)


@pytest.mark.parametrize("ends", [False, True])
def test_a_process_is_used_again_unless_its_result_forbids_it(ends):
    found = call_in_processes(behave, ["a", "b"], 1, LONG, lambda result: ends)
    first, second = (result[0] for result in found.values())
    assert (first != second) is ends
