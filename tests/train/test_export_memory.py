"""An export holds one tensor and a few rows' intermediate results, however large the model is."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fourbits.model.lm import LanguageModel
from fourbits.settings import dump_yaml, to_dict
from fourbits.train.checkpoint import save_checkpoint
from fourbits.train.load_run import open_trained
from fourbits.train.run_folder import RunFolder
from support.small_runs import trained

BLOCKS, WIDTH, FFN = 8, 1024, 4096
SLAB = 1 << 18
MIB = 1 << 20
#: intermediate results of quantizing one slab, in FP32 tensors of its size, and what the allocator keeps
TENSORS, ALLOCATOR = 16, 16 * MIB


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A run whose checkpoint is that of a wide model that was never trained."""
    folder = RunFolder(trained(tmp_path_factory.mktemp("wide")))
    config = folder.stored_config()
    model = replace(
        config.model, d_model=WIDTH, d_ffn=FFN, num_heads=64, num_kv_heads=64, pattern="T" * BLOCKS
    )
    folder.config.write_bytes(dump_yaml(to_dict(replace(config, model=model))).encode())
    with torch.device("meta"):
        described = dict(LanguageModel(model).named_parameters())
    masters = {name: torch.randn(tensor.shape) / 32 for name, tensor in described.items()}
    save_checkpoint(folder.checkpoints, 3, {"model": masters}, {})
    return folder.path


@pytest.mark.parametrize("format_name", ["hf", "compressed-tensors"])
def test_the_peak_is_the_largest_tensor_and_a_few_rows(format_name, wide, tmp_path):
    """Two tensors, because a check holds what was written beside the master.

    At 12B parameters they are the embedding in FP32 (2.7 GB) and in BF16 (1.3 GB), and the intermediates of
    slabs, 16 times as large, 0.27 GB: 1.6 GB over the largest tensor.
    """
    sizes = [4 * master.numel() for master in open_trained(wide).masters.values()]
    arguments = [str(wide), format_name, str(tmp_path), str(SLAB)]
    found = subprocess.run(
        [sys.executable, "-m", "support.export_memory", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=True,
    )
    peak, largest = int(found.stdout.split()[-1]), max(sizes)
    bound = 2 * largest + TENSORS * 4 * SLAB + ALLOCATOR
    assert sum(sizes) > 4 * bound, "the model is too small to tell"
    assert peak <= bound
