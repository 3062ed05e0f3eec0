"""The shuffle: a bijection for every size and key, equal on every machine, and with no visible order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourbits.data.stream.shuffle import derive_key, derive_keys, mix64, permute


def shuffled(size: int, key: int) -> np.ndarray:
    return permute(np.arange(size), size, np.array([key], dtype=np.uint64))


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(size, key):
    assert np.array_equal(np.sort(shuffled(size, key)), np.arange(size))


@given(size=st.integers(2**40, 2**62), key=st.integers(0, 2**64 - 1), start=st.integers(0, 2**39))
def test_permute_keeps_distinct_indices_distinct_at_sizes_beyond_any_table(size, key, start):
    index = np.arange(start, start + 200)
    value = permute(index, size, np.array([key], dtype=np.uint64))
    assert value.min() >= 0
    assert value.max() < size
    assert len(np.unique(value)) == 200


@given(size=st.integers(1, 500), keys=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_a_key_per_index_gives_what_each_key_gives_alone(size, keys):
    index = np.arange(len(keys)) % size
    together = permute(index, size, np.array(keys, dtype=np.uint64))
    alone = [permute(index[i : i + 1], size, np.array([key], np.uint64))[0] for i, key in enumerate(keys)]
    assert together.tolist() == alone


def test_permute_has_not_changed():
    # Frozen outputs: runs of earlier versions can be resumed only if these stay the same.
    assert shuffled(10, 1).tolist() == [2, 7, 8, 9, 0, 3, 6, 1, 4, 5]
    assert int(mix64(np.array([1], np.uint64))[0]) == 0x5692161D100B05E5


def test_every_index_is_equally_likely_at_every_position():
    size, trials = 7, 7000
    keys = derive_keys(derive_key(3), np.arange(trials))
    counts = np.array(
        [np.bincount(permute(np.full(trials, i), size, keys), minlength=size) for i in range(size)]
    )
    p = 1 / size
    assert np.abs(counts - trials * p).max() < 5 * (trials * p * (1 - p)) ** 0.5  # five sigma, 49 counts


def test_neighbours_do_not_stay_neighbours():
    size = 10_000
    steps = np.abs(np.diff(shuffled(size, 5)))
    # For a random order the mean distance of two entries is n/3 with deviation n / sqrt(18) each.
    assert abs(steps.mean() - size / 3) < 5 * size / 18**0.5 / size**0.5
    assert (steps == 1).sum() < 2 + 5 * 2**0.5  # expected 2 of 9,999


def test_keys_depend_on_every_part_and_its_place():
    keys = {derive_key(*parts) for parts in [(1, 2), (2, 1), (1, 2, 0), (0, 1, 2), (1,), (-1,), (2**64 - 2,)]}
    assert len(keys) == 7


@pytest.mark.parametrize(("index", "size"), [([0], 0), ([5], 5), ([-1], 5)])
def test_an_index_outside_is_an_error(index, size):
    with pytest.raises(ValueError, match="permute"):
        permute(np.array(index), size, np.zeros(1, np.uint64))
