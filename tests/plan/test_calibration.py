"""A calibration: its file, the rates that follow from it, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import torch

from fourbits.bench.calibrate import CPU_SIZES, calibrate
from fourbits.cli.main import main
from fourbits.plan.calibration import (
    Calibration,
    GemmTime,
    calibrated,
    gpu_of,
    how_to_use,
    load_calibration,
    to_json,
)
from fourbits.plan.gpus import GPUS
from fourbits.plan.rates import DECLARED, Rates, gemm_seconds
from fourbits.train.ranks.ranks import Ranks

H200 = GPUS["h200"]
SHAPES = ((8192, 8192, 8192), (16384, 6144, 2048), (6144, 2048, 16384))


def as_measured(share: float) -> Calibration:
    """An H200 whose full BF16 GEMMs run at `share` of the peak; memory at 0.9, attention at 0.5."""
    rates = Rates(gemm=share, copy=0.9)
    gemms = tuple(
        GemmTime(unit="bf16", m=m, n=n, k=k, seconds=gemm_seconds(H200, rates, (m, n, k), ("bf16", 2, 2)))
        for m, n, k in SHAPES
    )
    return Calibration(
        device="NVIDIA H200",
        torch="2.11",
        fourbits="0.1.0",
        copy=0.9 * H200.bandwidth,
        gemms=gemms,
        quantize=0.6 * 0.9 * H200.bandwidth,
        attention=0.5 * H200.bf16_peak,
    )


def test_a_file_reads_back(tmp_path: Path):
    path = tmp_path / "h200.json"
    path.write_text(to_json(as_measured(0.75)), encoding="utf-8")
    assert load_calibration(path) == as_measured(0.75)


def test_rates_are_those_that_were_measured_and_others_stay_declared():
    rates = calibrated(as_measured(0.75), H200)
    assert rates.gemm_share("bf16") == pytest.approx(0.75, rel=1e-6)
    assert rates.gemm_share("emulated") == rates.gemm_share("bf16")
    assert rates.copy == pytest.approx(0.9)
    assert rates.quantize == pytest.approx(0.6)
    assert rates.attention == pytest.approx(0.5)
    assert (rates.scan, rates.quantize_stochastic) == (DECLARED.scan, DECLARED.quantize_stochastic)
    assert "measured on one NVIDIA H200" in rates.source


def test_a_plan_says_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "h200.json"
    path.write_text(to_json(as_measured(0.75)), encoding="utf-8")
    command = ["plan", "hybrid-1.2b", "--gpu", "h200", "--calibration", str(path), "--json"]
    assert main(command) == 0
    fast = json.loads(capsys.readouterr().out)
    assert main(command[:4] + ["--json"]) == 0
    declared = json.loads(capsys.readouterr().out)
    assert fast["figures"] == "predicted from rates measured on one NVIDIA H200, else declared ones"
    assert fast["recipes"][0]["step_seconds"] < declared["recipes"][0]["step_seconds"]
    measured, rest = (line for line in fast["assumptions"] if line.startswith("efficiencies"))
    assert measured.startswith("efficiencies, measured on one NVIDIA H200: ")
    assert "copying 0.90 of the memory bandwidth" in measured
    assert "large GEMMs in BF16 0.75 of the peak" in measured
    assert rest.startswith("efficiencies, declared: ")
    assert "SSD scan" in rest
    assert "SSD scan" not in measured
    assert "large GEMMs in FP8" in rest


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[]", "an object"),
        ('{"form": "other", "device": "x", "torch": "", "fourbits": "", "copy": 1}', "form"),
        ('{"device": "NVIDIA H100 80GB HBM3", "torch": "", "fourbits": "", "copy": 1e12}', "h100"),
        (
            '{"device": "NVIDIA H200", "torch": "", "fourbits": "", "copy": 1e17}',
            "at most 7.2e+12 per second",
        ),
        (
            '{"device": "NVIDIA H200", "torch": "", "fourbits": "", "copy": 4e12, "scan": 9e15}',
            "scan must be at most 1.48e+15 per second on h200, got 9e+15. Measure again",
        ),
        (
            '{"device": "NVIDIA H200", "torch": "", "fourbits": "", "copy": -1}',
            "copy must be from 1000 to 1e+18, got -1.0. Measure again",
        ),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_other_files_are_refused_in_one_line(content, words, tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text(content, encoding="utf-8")
    assert main(["plan", "tiny", "--gpu", "h200", "--calibration", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"copy": 1e-300}, "copy must be from 1000 to 1e+18, got 1e-300. Measure again"),
        ({"copy": "fast"}, "copy must be a number, got 'fast'."),
        ({"attention": 1e300}, "attention must be from"),
        ({"link": 0.0}, "link must be from"),
        ({"ranks": 0}, "ranks must be from 1 to 1e+06, got 0. Measure again"),
        ({"gemms": [{"m": 0}]}, "m must be from 1 to"),
        ({"gemms": [{"k": -8}]}, "k must be from 1 to"),
        ({"gemms": [{"seconds": 0.0}]}, "seconds must be from 1e-09 to 100000, got 0.0. Measure again"),
        ({"gemms": [{"unit": "int8"}]}, "unit must be one of 'bf16', 'fp8', 'nvfp4', 'emulated', got 'int8'"),
    ],
    ids=str,
)
def test_numbers_that_no_machine_has_are_refused_by_name(change, words, tmp_path, capsys):
    gemm = {"unit": "bf16", "m": 8192, "n": 8192, "k": 8192, "seconds": 1e-3}
    given = {"device": "NVIDIA H200", "torch": "", "fourbits": "", "copy": 1e12} | change
    given["gemms"] = [gemm | each for each in change.get("gemms", [{}])]
    path = tmp_path / "c.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    assert main(["plan", "tiny", "--gpu", "h200", "--calibration", str(path)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_a_plan_reads_a_file_with_the_command_that_the_benchmark_prints(gpu, tmp_path: Path):
    path = tmp_path / "rates.json"
    found = Calibration(device=gpu.device, torch="", fourbits="", copy=1e12)
    path.write_text(to_json(found), encoding="utf-8")
    command = re.search(r"`fourbits (plan CONFIG .*)`", how_to_use(found, path))
    assert command is not None
    assert main(command[1].replace("CONFIG", "tiny").split()) == 0


def test_a_file_that_no_plan_can_use_is_named_and_refused_with_a_remedy(tmp_path: Path, capsys):
    path = tmp_path / "rates.json"
    found = Calibration(device="x86_64 CPU", torch="", fourbits="", copy=1e9)
    path.write_text(to_json(found), encoding="utf-8")
    assert how_to_use(found, path).endswith("`fourbits plan` cannot use them")
    assert main(["plan", "tiny", "--gpu", "h100", "--calibration", str(path)]) == 2
    assert capsys.readouterr().err.endswith("Measure one of these, or plan without a calibration.\n")


@pytest.mark.gpu
def test_a_gpu_is_measured_within_its_peaks():
    found = calibrate(Ranks(torch.device("cuda")))
    assert {g.unit for g in found.gemms} >= {"bf16", "emulated", "fp8"}
    assert found.scan is not None
    assert found.attention is not None
    if any(gpu.device == found.device for gpu in GPUS.values()):
        rates = calibrated(found, gpu_of(found))
        shares = (*dict(rates.gemm_of).values(), rates.copy, rates.attention, rates.quantize)
        assert all(0.2 < share <= 1.0 for share in shares)


@pytest.mark.slow
def test_a_machine_is_measured_and_what_it_lacks_is_named():
    found = calibrate(Ranks(torch.device("cpu")))
    assert {(g.m, g.n, g.k) for g in found.gemms} == set(CPU_SIZES.gemms)
    assert {g.unit for g in found.gemms} == {"bf16", "emulated", "fp8"}
    assert found.missing.keys() == {"nvfp4", "scan", "link"}
    assert json.loads(to_json(found))["copy"] > 0
