"""Experts whose parameters are DTensors, on two processes, have the bits of experts in one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from linear.two_ranks_experts import FULLY_SHARDED, OWN, by_experts, fully_sharded
from support.assertions import assert_same_bytes
from support.two_processes import results_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank found."""
    return results_of(Path(__file__).with_name("two_ranks_experts.py"), tmp_path_factory.mktemp("ranks"))


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name == "bypassed":
            assert (found[name], value) == ((), ())
        else:
            assert_same_bytes(found[name], value, name)


@pytest.mark.parametrize(("kind", "first"), FULLY_SHARDED)
def test_fsdp2_changes_no_bit_whether_a_model_is_converted_or_sharded_first(ranks, kind, first):
    """Both ranks get the same tokens, so the mean of their gradients is each one's."""
    expected = fully_sharded(kind, None, None)
    for found in ranks:
        assert_same(found["fully sharded"][kind, first], expected)


@pytest.mark.parametrize("kind", OWN)
def test_experts_sharded_by_dtensors_have_their_numbers_and_bits(ranks, kind):
    """Each rank multiplies the rows of its experts; together that is what one process computes."""
    expected = by_experts(kind, None, False)
    parts = [found["by experts"][kind] for found in ranks]
    assert_same({**parts[0], "y": torch.cat([part["y"] for part in parts])}, expected)


def test_replicated_dtensors_are_used_as_tensors(ranks):
    assert_same(ranks[1]["replicated"], by_experts("einsum", None, False))


def test_experts_sharded_by_features_are_refused_by_name(ranks):
    assert ranks[0]["refused"].startswith(
        "experts: a DTensor must be sharded by experts, Shard(0), or replicated, got S(1) for experts_in "
    )
