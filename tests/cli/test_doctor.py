"""`fourbits doctor`: what to type next, rates, and tests that find a kernel which computes something else."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from fourbits.bench import processes
from fourbits.bench import self_tests as tests_of
from fourbits.bench.processes import Lost
from fourbits.bench.self_tests import rates, self_tests
from fourbits.cli.doctor import next_command
from fourbits.cli.main import main
from fourbits.device import probe

CPU = torch.device("cpu")
GPU: dict[str, Any] = {"idle_gpu": None, "device": {"kind": "cuda"}, "native_blocker": "no FP4"}
PASSED = [{"what": "attention", "passed": True}, {"what": "experts", "passed": None}]


@pytest.mark.parametrize(
    ("findings", "command"),
    [
        ({**GPU, "device": {"kind": "cpu"}}, "fourbits demo"),
        ({**GPU, "idle_gpu": "torch is built for CPUs only"}, "make install"),
        (GPU, "fourbits doctor --check"),
        ({**GPU, "self_tests": PASSED}, "fourbits train 30m"),
        ({**GPU, "self_tests": PASSED, "native_blocker": None}, "fourbits doctor --native"),
        (
            {**GPU, "self_tests": [{"what": "attention", "passed": False}]},
            "do not train here: attention failed",
        ),
    ],
)
def test_the_next_command_follows_from_the_findings(findings, command):
    assert next_command(findings).startswith(command)


def test_every_test_has_a_result_or_a_reason_and_rates_are_measured():
    found = self_tests(probe("cpu"), budget=-1.0)
    assert len(found) == 12
    assert all(each.passed is None and each.detail for each in found)
    measured = rates(CPU, probe("cpu"))
    assert set(measured) == {"memory, measured", "BF16 GEMM, measured"}


def test_attention_that_is_not_causal_is_found(monkeypatch):
    assert tests_of._attention(CPU)[0]
    real = torch.nn.functional.scaled_dot_product_attention

    def wrong(q, k, v, is_causal, enable_gqa):
        return real(q, k, v, is_causal=q.dtype == torch.float64, enable_gqa=enable_gqa)

    monkeypatch.setattr(tests_of.F, "scaled_dot_product_attention", wrong)
    assert not tests_of._attention(CPU)[0]


def test_an_fp8_gemm_with_a_scale_too_large_is_found(monkeypatch):
    assert tests_of._fp8(CPU)[0]
    monkeypatch.setattr(
        tests_of,
        "gemm",
        lambda a, b, dtype, bias: lambda a, b, c: a.values.to(dtype) @ b.values.t().to(dtype),
    )
    assert not tests_of._fp8(CPU)[0]


def test_a_test_that_raises_has_failed_and_says_why():
    def stopped() -> tuple[bool, str]:
        raise RuntimeError("no such instruction\nand more")

    assert tests_of._result(stopped) == (False, "RuntimeError: no such instruction")


def test_doctor_fails_on_a_wrong_kernel_and_shows_it(monkeypatch, capsys):
    broken = [("attention", None, lambda: (False, "3.00 of the allowed error (dv)"))]
    monkeypatch.setattr(tests_of, "_tests", lambda device, described: broken)
    monkeypatch.setattr("fourbits.cli.doctor.rates", lambda device, described: {})
    assert main(["doctor", "--device", "cpu", "--check"]) == 1
    out = capsys.readouterr().out
    assert "WRONG: 3.00 of the allowed error (dv)" in out
    assert "do not train here: attention failed" in out
    assert main(["doctor", "--device", "cpu", "--check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["self_tests"][0]["passed"] is False


@pytest.fixture
def three_tests(monkeypatch):
    """Three tests that compile nothing on a CPU."""
    real = tests_of._tests
    names = ["attention", *(f"quantizers and emulated GEMMs: {gemm}" for gemm in ("fprop", "dgrad"))]
    monkeypatch.setattr(
        tests_of, "_tests", lambda device, described: [t for t in real(device, described) if t[0] in names]
    )
    return names


def test_tests_in_parallel_have_the_results_of_those_in_turn(three_tests):
    in_turn, in_parallel = (
        [replace(each, seconds=0.0) for each in self_tests(probe("cpu"), 300.0, count)] for count in (1, 2)
    )
    assert [each.what for each in in_turn] == three_tests
    assert all(each.passed for each in in_turn)
    assert in_parallel == in_turn


def test_a_test_whose_process_crashes_has_failed(three_tests, monkeypatch):
    crash = Lost("its process was killed by SIGSEGV", 1.5)
    monkeypatch.setattr(tests_of, "call_in_processes", lambda *arguments: {three_tests[1]: crash})
    attention, fprop, _ = self_tests(probe("cpu"), processes=2)
    assert (fprop.passed, fprop.detail, fprop.seconds) == (False, *crash)
    assert attention.passed is None
    assert "is used up" in attention.detail


@pytest.mark.parametrize(("device", "count", "parallel"), [("cpu", 16, 0), ("cuda", 3, 0), ("cuda", 16, 2)])
def test_only_tests_of_a_gpu_run_in_parallel_and_only_on_enough_cores(device, count, parallel, monkeypatch):
    quick = [(what, None, lambda: (True, "")) for what in "ab"]
    asked = [0]

    def call(run, names, count, *rest):
        asked.append(count)
        return {}

    monkeypatch.setattr(tests_of, "_tests", lambda device, described: quick)
    monkeypatch.setattr(processes, "cores", lambda: count)
    monkeypatch.setattr(tests_of, "call_in_processes", call)
    self_tests(replace(probe("cpu"), kind=device))
    assert asked[-1] == parallel


@pytest.mark.gpu
def test_a_gpu_passes_every_test_that_it_can_run():
    found = self_tests(probe("cuda"), budget=120.0)
    assert [each for each in found if each.passed is False] == []
    assert sum(each.passed is True for each in found) >= 6
