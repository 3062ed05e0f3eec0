"""1, 2 and 4 ranks multiply the same operands, byte for byte, in every GEMM of a step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fourbits.data.config import open_data
from fourbits.settings import override
from support.torchrun import PATIENCE, environment, written

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("record_operands.py")


def operands(ranks, file, cache, out):
    """By micro-batch, the hashes of the operands of its GEMMs. ranks: 0 for a process without torchrun."""
    out.mkdir()
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    )
    command = [sys.executable, *launcher, str(SCRIPT), file, str(cache), str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment())
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(path.read_text()) for path in sorted(out.iterdir())]
    assert len(found) == max(ranks, 1)
    return {number: hashes for each in found for number, hashes in each.items()}


@pytest.mark.parametrize(
    ("checkpointing", "gather"),
    [
        ("none", "packed"),
        ("full", "packed"),
        ("none", "masters"),
        ("none", "each block by itself"),
        ("none", "once per step"),
    ],
)
def test_every_operand_of_a_step_is_that_of_one_process(config, data_cache, tmp_path, checkpointing, gather):
    changes = {
        "train.gradient_accumulation": 4,
        "train.activation_checkpointing": checkpointing,
        "parallel.gather": "masters" if gather == "masters" else "packed",
    }
    if gather == "each block by itself":
        changes["parallel.gather_weights"] = 0
    if gather == "once per step":
        changes["parallel.reshard"] = "step"
    settings = override(config, changes)
    open_data(settings.data, data_cache)
    file = written(settings, tmp_path)
    one = operands(0, file, data_cache, tmp_path / "one")
    assert sorted(one) == ["0", "1", "2", "3"]
    # three GEMMs of each of the four quantized layers; recomputed, Fprop once more
    assert {len(hashes) for hashes in one.values()} == {12 if checkpointing == "none" else 16}
    # stochastic rounding and data differ between micro-batches
    assert len({hashes for each in one.values() for hashes in each}) > 12
    for ranks in (1, 2, 4):
        assert operands(ranks, file, data_cache, tmp_path / f"{ranks}") == one
