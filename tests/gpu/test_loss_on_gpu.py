"""A GPU trains like a CPU: their losses differ like those of two runs that sum in another order."""

import json
from pathlib import Path

import pytest

from fourbits.gemm.kernels import start as matmul_triton
from gpu.loss_curve import loss_curve, mean_difference

pytestmark = pytest.mark.gpu

#: written by the command in loss_curve.py, torch 2.13 on one core with AVX-512
CPU = Path(__file__).with_name("loss_curve_cpu.json")


def test_losses_on_a_gpu_differ_from_a_cpus_like_those_of_another_tile(monkeypatch):
    cpu = json.loads(CPU.read_text())
    gpu = loss_curve("cuda", len(cpu))
    usual = matmul_triton.card_of
    monkeypatch.setattr(
        matmul_triton, "card_of", lambda device: usual(device)._replace(tiles=usual(device).tiles[2:])
    )
    other_tiles = loss_curve("cuda", len(cpu))
    assert gpu != other_tiles
    # both pairs of runs differ in the order of FP32 sums only, and diverge from there; twice allows for
    # chance
    assert mean_difference(gpu, cpu) <= 2 * mean_difference(gpu, other_tiles)
