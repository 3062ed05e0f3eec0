"""A card learns what a CPU learns: losses differ like those of two runs that sum in another order."""

import json
from pathlib import Path

import pytest

from fourbits.gemm.kernels import start as matmul_triton
from gpu.loss_curve import loss_curve, mean_difference

pytestmark = pytest.mark.gpu

#: made by the command in loss_curve.py, torch 2.13 on one core with AVX-512
CPU = Path(__file__).with_name("loss_curve_cpu.json")


def test_losses_differ_from_a_cpus_as_those_of_other_tiles_do(monkeypatch):
    cpu = json.loads(CPU.read_text())
    card = loss_curve("cuda", len(cpu))
    usual = matmul_triton.card_of
    monkeypatch.setattr(
        matmul_triton, "card_of", lambda device: usual(device)._replace(tiles=usual(device).tiles[2:])
    )
    other_tiles = loss_curve("cuda", len(cpu))
    assert card != other_tiles
    # both differences are of runs that part by the order of FP32 sums and grow apart; twice allows for chance
    assert mean_difference(card, cpu) <= 2 * mean_difference(card, other_tiles)
