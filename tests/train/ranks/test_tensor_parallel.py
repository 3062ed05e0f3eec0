"""Ranks that share layers multiply slices of what one process multiplies, and get its loss and gradients."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fourbits.data.config import open_data
from fourbits.model.config import ModelConfig
from fourbits.settings import override
from fourbits.train.config import RunConfig
from fourbits.train.ranks.splits import Split
from fourbits.train.trainer import Trainer
from support.assertions import assert_same_bytes
from support.torchrun import PATIENCE, environment, written
from train.ranks import replay

SCRIPT = Path(replay.__file__)
#: the longest sum of a step, over the vocabulary
LONGEST = 384
#: every kind of block; heads, groups and widths divide among 4 ranks
MODEL = ModelConfig(
    vocab_size=LONGEST,
    d_model=32,
    pattern="TM*-M",
    d_ffn=64,
    activation="swiglu",
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    rope_theta=10000.0,
    qk_norm=True,
    mamba_num_heads=64,
    mamba_head_dim=2,
    state_size=16,
    num_groups=4,
    chunk_size=16,
)
#: X and W stochastic, too, so that random bits are drawn for every role
STOCHASTIC = {f"recipe.{role}.rounding": "sr" for role in ("fprop.lhs", "fprop.rhs", "wgrad.rhs")}


#: relative change of weights that stands for other orders of all sums: gamma_n of FP32, n additions long
GAMMA = LONGEST * 2.0**-24


class Shared(NamedTuple):
    """A run's settings, and what one process computed in its first step."""

    settings: RunConfig
    recording: replay.Recording
    health: dict[str, Any]
    gradients: dict[str, Tensor]
    #: by how much the gradients may differ, as a 2-norm
    bounds: dict[str, float]
    folder: Path


@pytest.fixture(scope="module", params=["stochastic"])
def shared(request, config, tmp_path_factory, data_cache) -> Shared:
    changes = STOCHASTIC if request.param == "stochastic" else {}
    settings = override(replace(config, model=MODEL), changes)
    open_data(settings.data, data_cache)
    folder = tmp_path_factory.mktemp("shared")
    recording, health = replay.replayed(replay.trainer_of(settings, data_cache))
    torch.save(replay.plain(recording), folder / "recording.pt")
    gradients = replay.gradients_of(replay.fp32_trainer(settings, data_cache))
    bounds = {name: GAMMA * float(gradient.norm()) for name, gradient in gradients.items()}
    for seed in range(3):
        moved = replay.gradients_of(moved_by_gamma(replay.fp32_trainer(settings, data_cache), seed))
        for name, gradient in gradients.items():
            bounds[name] += float((moved[name] - gradient).norm())
    return Shared(settings, recording, health, gradients, bounds, folder)


def moved_by_gamma(trainer: Trainer, seed: int) -> Trainer:
    """Every weight multiplied by 1 + GAMMA or 1 - GAMMA.

    A sum of n terms in another order is the sum of terms that are off by gamma_n at most (Higham, Accuracy
    and Stability, section 4.2), so that a step in another order is one of weights that are off as much.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for master in trainer.masters.values():
            signs = torch.randint(2, master.shape, generator=generator) * 2.0 - 1.0
            master.mul_(1.0 + GAMMA * signs)
    return trainer


def replayed(shared: Shared, ranks: int, tensor: int, cache: Path) -> list[Any]:
    """What each rank found in the step of one process, replayed."""
    changes = {"parallel.tensor": tensor}
    out = shared.folder / f"{ranks} ranks, {tensor} share layers"
    out.mkdir()
    file = written(override(shared.settings, changes), out)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = [str(SCRIPT), file, str(cache), str(shared.folder / "recording.pt"), str(out)]
    ended = subprocess.run(
        [sys.executable, *launcher, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(),
    )
    assert ended.returncode == 0, ended.stderr
    found = [torch.load(path) for path in sorted(out.glob("rank_*.pt"))]
    assert len(found) == ranks
    return found


#: what the operands of Fprop, Dgrad and Wgrad are
TENSORS = (("x", "w"), ("dy", "w"), ("dy", "x"))


def part(tensor: str, whole: Tensor, split: Split, rank: int, ranks: int) -> Tensor:
    """What a rank has of X, W or dY, where the weight is split."""
    if tensor == "w":
        return split.part(whole, rank, ranks)
    in_parts = split.dim == (1 if tensor == "x" else 0)
    return Split(whole.shape, 1, split.segments).part(whole, rank, ranks) if in_parts else whole


def assert_slices(calls: Any, recording: replay.Recording, place: Any, gemms: tuple[int, ...]) -> None:
    """Every operand of every GEMM is the slice of one process's, byte for byte. gemms: the order of calls."""
    rank, ranks, splits = place
    for key, (_, _, found) in calls.items():
        split, expected = Split(*splits[key[1]]), recording[key].gemms
        assert len(found) == len(gemms)
        for gemm, operands in zip(gemms, found, strict=True):
            for tensor, (values, scale), (whole, its) in zip(
                TENSORS[gemm], operands, expected[gemm], strict=True
            ):
                message = f"{key} GEMM {gemm} {tensor}"
                assert_same_bytes(values, part(tensor, whole, split, rank, ranks), message)
                assert_same_bytes(scale, its, message)


def check(shared: Shared, ranks: int, tensor: int, cache: Path, packed: bool = False) -> None:
    found = replayed(shared, ranks, tensor, cache)
    assert any("as codes and scales" in note for note in found[0]["notes"]) == packed
    seen = [key for each in found[::tensor] for key in each["none"][0]]
    assert sorted(seen) == sorted(shared.recording)  # each micro-batch on one rank of those that share tokens
    for each in found:
        assert_slices(each["none"][0], shared.recording, each["place"], (0, 1, 2))
        assert_slices(each["full"][0], shared.recording, each["place"], (0, 0, 1, 2))
        for name, gradient in shared.gradients.items():
            assert float((each["fp32"][name] - gradient).norm()) <= shared.bounds[name], name
    assert found[0]["none"][1] == shared.health


def test_two_ranks_that_share_layers(shared, data_cache):
    """Operands of all GEMMs, with and without recomputation, health, and loss and gradients in FP32."""
    check(shared, 2, 2, data_cache)


@pytest.mark.slow
def test_four_ranks_that_share_layers(shared, data_cache):
    check(shared, 4, 4, data_cache)


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["nvfp4"], indirect=True)
def test_two_pairs_of_ranks_whose_weights_are_sent_as_codes(shared, data_cache):
    check(shared, 4, 2, data_cache, packed=True)
