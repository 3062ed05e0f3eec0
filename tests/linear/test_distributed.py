"""DDP and FSDP2 on two processes compute what one process computes on the tokens of each rank."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fourbits.linear.checkpoint_state import recipe_state
from fourbits.linear.convert import convert
from linear import two_ranks
from support.assertions import assert_same_bytes
from support.two_processes import WORLD, results_of

SCRIPT = Path(__file__).with_name("two_ranks.py")
CASES = ["ddp", "fsdp2", "fsdp2, recomputed", "fsdp2, bf16"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each rank found."""
    return results_of(SCRIPT, tmp_path_factory.mktemp("ranks"))


def one_process(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of both ranks, and the mean of their gradients."""
    losses: list[Tensor] = []
    mean: dict[str, Tensor] = {}
    for rank in range(WORLD):
        model = two_ranks.Model().to(dtype)
        convert(model, "nvfp4")
        losses.append(two_ranks.backward(Cast(model, dtype), rank))
        for name, grad in two_ranks.gradients(model).items():
            mean[name] = mean.get(name, 0) + grad / WORLD
    return losses, mean


class Cast(nn.Module):
    """A model whose input is cast, as FSDP2's mixed precision does."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.to(self.dtype))


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_have_the_bits_of_one_process(ranks, case):
    """A sum of two halves has one order, so not even the reduction may differ."""
    losses, mean = one_process(torch.bfloat16 if case == "fsdp2, bf16" else torch.float32)
    for rank, found in enumerate(ranks):
        assert_same_bytes(found[case]["loss"], losses[rank], f"loss of rank {rank}")
        for name, grad in mean.items():
            assert_same_bytes(found[case]["gradients"][name], grad, name)


@pytest.mark.parametrize("case", CASES)
def test_the_keys_of_the_state_dict_stay(ranks, case):
    assert all(found[case]["keys"] == list(two_ranks.Model().state_dict()) for found in ranks)


@pytest.mark.parametrize("case", ["fsdp2", "fsdp2, recomputed"])
def test_sharded_linears_can_be_restored(ranks, case):
    for rank, found in enumerate(ranks):
        expected = two_ranks.Model()(two_ranks.data(rank)[0])
        assert_same_bytes(found[case]["after"], expected.detach())


def test_amax_policies_of_two_ranks_are_those_of_one_process_with_two_micro_batches(ranks):
    model = two_ranks.Model()
    convert(model, two_ranks.delayed())
    losses: list[Tensor] = []
    for step in (two_ranks.STEP, two_ranks.STEP + 1):
        model.zero_grad()
        losses = [two_ranks.backward(model, rank, step) for rank in range(WORLD)]
    state = recipe_state(model)
    for rank, found in enumerate(ranks):
        found = found["amax policies"]
        assert_same_bytes(found["loss"], losses[rank], f"loss of rank {rank}")
        assert found["state"].keys() == state.keys()
        for key, value in state.items():
            assert_same_bytes(found["state"][key], value, key)
        for name, grad in two_ranks.gradients(model).items():
            assert_same_bytes(found["gradients"][name] * WORLD, grad, name)


def test_several_ranks_without_a_reduction_are_refused(ranks):
    for found in ranks:
        assert "must use values from all ranks, got reduce=None" in found["amax policies"]["refused"]
