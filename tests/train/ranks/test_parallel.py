"""The settings that say how ranks share a run, and the micro-batches of each."""

import pytest

from fourbits.train.parallel import ParallelConfig, mesh_shape, micro_batches


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
def test_ranks_compute_every_micro_batch_once_in_order(world):
    of_ranks = [micro_batches(12, rank, world) for rank in range(world)]
    assert [number for own in of_ranks for number in own] == list(range(12))


@pytest.mark.parametrize(
    ("accumulation", "world", "remedy"),
    [
        (4, 3, "Nearest: 3 or 6. Or start 2 ranks."),
        (2, 4, "Nearest: 4. Or start 2 ranks."),
        (1, 2, "Nearest: 2. Or start 1 ranks."),
    ],
)
def test_micro_batches_that_do_not_divide_name_numbers_that_do(accumulation, world, remedy):
    with pytest.raises(ValueError, match="multiple of the number of ranks") as error:
        micro_batches(accumulation, 0, world)
    assert str(error.value).endswith(remedy)


def test_a_mesh_fits_any_number_of_ranks_that_its_copies_divide():
    assert mesh_shape(ParallelConfig(), 8) == (1, 8)
    assert mesh_shape(ParallelConfig(replicate=2), 8) == (2, 4)
    assert mesh_shape(ParallelConfig(replicate=2, shard=4), 8) == (2, 4)


@pytest.mark.parametrize(
    ("config", "world", "remedy"),
    [
        (ParallelConfig(replicate=3), 8, "Start 6 ranks, or set parallel.replicate to 1."),
        (ParallelConfig(replicate=2, shard=2), 8, "or start 4 ranks."),
    ],
)
def test_a_mesh_that_does_not_fit_says_how_many_ranks_would(config, world, remedy):
    with pytest.raises(ValueError, match=r"parallel\.") as error:
        mesh_shape(config, world)
    assert str(error.value).endswith(remedy)


def test_tensor_parallelism_is_refused_with_what_to_use():
    with pytest.raises(ValueError, match=r"not implemented. Use parallel\.shard"):
        ParallelConfig(tensor=2)
