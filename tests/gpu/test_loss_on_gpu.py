"""A GPU trains like a CPU: their losses differ like those of two runs that sum in another order."""

import json
from pathlib import Path

import pytest

from fourbits.gemm.kernels import launch_bf16
from fourbits.linear.plan import linear_plan
from gpu.loss_curve import loss_curve, mean_difference

pytestmark = pytest.mark.gpu

#: written by the command in loss_curve.py, torch 2.13 on one core with AVX-512
CPU = Path(__file__).with_name("loss_curve_cpu.json")


@pytest.fixture
def other_tiles(monkeypatch):
    """A call that makes GEMMs use other tiles from then on; cached plans have the usual ones."""
    usual = launch_bf16.gpu_model

    def change():
        monkeypatch.setattr(
            launch_bf16, "gpu_model", lambda device: usual(device)._replace(tiles=usual(device).tiles[2:])
        )
        forget_plans()

    yield change
    monkeypatch.undo()
    forget_plans()


def forget_plans():
    launch_bf16.bf16_gemm.cache_clear()
    linear_plan.cache_clear()


def test_losses_on_a_gpu_differ_from_a_cpus_like_those_of_other_tiles(other_tiles):
    cpu = json.loads(CPU.read_text())
    gpu = loss_curve("cuda", len(cpu))
    other_tiles()
    other = loss_curve("cuda", len(cpu))
    assert gpu != other
    # Both pairs differ in the order of FP32 sums only and diverge from there; twice allows for chance.
    assert mean_difference(gpu, cpu) <= 2 * mean_difference(gpu, other)
