"""The settings that say how ranks share a run, and the micro-batches of each."""

from typing import Any

import pytest

from fourbits.model.config import ModelConfig
from fourbits.train.parallel import ParallelConfig, mesh_shape, micro_batches, require_even


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
def test_ranks_compute_every_micro_batch_once_in_order(world):
    of_ranks = [micro_batches(12, rank, world) for rank in range(world)]
    assert [number for own in of_ranks for number in own] == list(range(12))


@pytest.mark.parametrize(
    ("accumulation", "world", "remedy"),
    [
        (4, 3, "Nearest: 3 or 6. Or start 2 ranks."),
        (2, 4, "Nearest: 4. Or start 2 ranks."),
        (1, 2, "Nearest: 2. Or start 1 rank."),
    ],
)
def test_micro_batches_that_do_not_divide_name_numbers_that_do(accumulation, world, remedy):
    with pytest.raises(ValueError, match="multiple of the number of ranks") as error:
        micro_batches(accumulation, 0, world)
    assert str(error.value).endswith(remedy)


def test_a_mesh_fits_any_number_of_ranks_that_its_copies_divide():
    assert mesh_shape(ParallelConfig(), 8) == (1, 8, 1)
    assert mesh_shape(ParallelConfig(replicate=2), 8) == (2, 4, 1)
    assert mesh_shape(ParallelConfig(replicate=2, shard=4), 8) == (2, 4, 1)


@pytest.mark.parametrize(
    ("config", "world", "remedy"),
    [
        (ParallelConfig(replicate=3), 8, "Start 6 ranks, or set parallel.replicate to 1."),
        (ParallelConfig(replicate=2, shard=2), 8, "or start 4 ranks."),
        (ParallelConfig(tensor=3), 8, "Start 6 ranks, or set parallel.tensor to 1."),
        (ParallelConfig(replicate=3, tensor=2), 8, "Start 6 ranks, or set parallel.replicate to 1."),
        (ParallelConfig(shard=2, tensor=2), 8, "or start 4 ranks."),
    ],
)
def test_a_mesh_that_does_not_fit_says_how_many_ranks_would(config, world, remedy):
    with pytest.raises(ValueError, match=r"parallel\.") as error:
        mesh_shape(config, world)
    assert str(error.value).endswith(remedy)


def test_a_mesh_has_ranks_that_share_layers():
    assert mesh_shape(ParallelConfig(tensor=2), 8) == (1, 4, 2)
    assert mesh_shape(ParallelConfig(replicate=2, tensor=2), 8) == (2, 2, 2)


def model(**changes: Any) -> ModelConfig:
    """Of every kind of block, which 2 ranks can share."""
    sizes: dict[str, Any] = {"d_ffn": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    sizes |= {"mamba_num_heads": 32, "mamba_head_dim": 4, "state_size": 16, "num_groups": 2}
    return ModelConfig(vocab_size=384, d_model=32, pattern="TM", **{**sizes, **changes})


@pytest.mark.parametrize(
    ("changes", "seq_len", "name"),
    [
        ({}, 33, "train.seq_len must be a multiple of 2"),
        ({"d_ffn": 48}, 32, "model.d_ffn must be a multiple of 32"),
        ({"num_heads": 3, "num_kv_heads": 3}, 32, "model.num_heads must be a multiple of 2"),
        ({"num_kv_heads": 1}, 32, "model.num_kv_heads must be a multiple of 2"),
        ({"head_dim": 8}, 32, "model.num_kv_heads [*] model.head_dim must be a multiple of 32"),
        ({"num_groups": 1}, 32, "model.num_groups must be a multiple of 2"),
        ({"mamba_num_heads": 16}, 32, "model.mamba_num_heads must be a multiple of 32"),
        ({"state_size": 8}, 32, "model.num_groups [*] model.state_size must be a multiple of 32"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused_with_what_to_set(changes, seq_len, name):
    require_even(model(), 32, 2)
    with pytest.raises(ValueError, match=f"parallel.tensor 2: {name}.* Set parallel.tensor to 1"):
        require_even(model(**changes), seq_len, 2)
