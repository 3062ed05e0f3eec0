"""Layers that parallelize_module shards multiply slices of what one process multiplies."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from linear import ranks_tensor_parallel as script
from support import parallel_llama
from support.assertions import assert_same_bytes
from support.straight_through import ExactGemm, exact_gemm
from support.two_processes import WORLD, results_of

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
#: what the operands of Fprop, Dgrad and Wgrad are
TENSORS = (("x", "w"), ("dy", "w"), ("dy", "x"))
#: the split dimension of a layer's weight
SPLIT = {"up": 0, "down": 1}
#: relative change of weights that stands for other orders of all sums of 128 terms, at most
GAMMA = parallel_llama.HIDDEN * 2.0**-24


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return results_of(Path(script.__file__), tmp_path_factory.mktemp("ranks"))


@cache
def one_process(name: str, first_token: int = 64, shift: int = 0) -> dict[str, Any]:
    return script.layer_called(name, False, script.ORDERS[0], None, 0, first_token, shift)


def slice_of(tensor: str, operand: Tensor, dim: int, rank: int) -> Tensor:
    """What a rank has of an operand of X, W or dY, where its weight is split along dim."""
    if tensor == "w":
        return script.part(operand, rank, dim)
    return script.part(operand, rank, 1 if tensor == ("dy", "x")[dim] else None)


def assert_slices(found: dict[str, Any], one: dict[str, Any], name: str, rank: int) -> None:
    for gemm, operands, whole in zip(TENSORS, found["operands"], one["operands"], strict=True):
        for tensor, (values, scale), (its, its_scale) in zip(gemm, operands, whole, strict=True):
            assert_same_bytes(values, slice_of(tensor, its, SPLIT[name], rank), f"{name} {gemm} {tensor}")
            assert_same_bytes(scale, its_scale, f"scale of {name} {gemm} {tensor}")


def exact_results(one: dict[str, Any]) -> dict[str, ExactGemm]:
    """Y without bias, dX and dW in FP64 from one process's operands, and FP32's distance from them."""
    made: dict[str, ExactGemm] = {}
    for key, (left, right) in zip(("y", "dx", "weight"), one["operands"], strict=True):
        lhs, rhs = (values.double() * scale.double() for values, scale in (left, right))
        lhs, rhs = {"y": (lhs, rhs), "dx": (lhs, rhs.t()), "weight": (lhs.t(), rhs.t())}[key]
        made[key] = exact_gemm(lhs, rhs)
    return made


def fields(gemm: ExactGemm) -> tuple[Tensor, Tensor]:
    return gemm.value, gemm.bound


@pytest.mark.parametrize("case", script.CASES, ids=str)
def test_operands_are_slices_and_results_those_of_one_process(ranks, case):
    """Whatever the input's and output's layouts, and whether the model was converted or sharded first."""
    name, sequence, _ = case
    one = one_process(name)
    exact, tokens = exact_results(one), 1 if sequence else None
    bias = one["bias_values"].double()
    exact["y"] = ExactGemm(exact["y"].value + bias, exact["y"].bound + bias.abs() * 2.0**-23)
    for rank, results in enumerate(ranks):
        found = results["layers"][case]
        assert_slices(found, one, name, rank)
        dims = {"up": {"y": -1, "dx": tokens}, "down": {"y": tokens, "dx": -1}}[name]
        for key, dim in dims.items():
            given = (each.view(2, 16, -1) for each in fields(exact[key]))
            ExactGemm(*(script.part(each, rank, dim) for each in given)).assert_near(found[key])
        exact["weight"].assert_near(found["weight"])
        torch.testing.assert_close(found["bias"], one["bias"], rtol=32 * 2.0**-23, atol=1e-5)
        of_bias = "Shard(dim=0)" if name == "up" else "Replicate()"
        assert found["placements"] == {"weight": f"(Shard(dim={SPLIT[name]}),)", "bias": f"({of_bias},)"}


def test_the_sum_over_ranks_is_in_the_dtype_of_the_output(ranks):
    first, second = (found["bf16"] for found in ranks)
    assert_same_bytes(first["sum"], first["partial"] + second["partial"])
    assert first["sum"].dtype == torch.bfloat16


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("how", ["recomputed", "compiled"])
def test_a_recomputed_or_compiled_model_has_the_bits_of_an_eager_one(ranks, sequence, how):
    assert all(found["same"][sequence][how] for found in ranks)


def test_the_weights_operand_is_kept_for_the_micro_batches_of_a_step(ranks):
    assert all(found["kept"] == [False, False, False, True] for found in ranks)


def test_a_layer_that_all_ranks_have_in_full_computes_as_in_one_process(ranks):
    for name, value in script.replicated(None).items():
        for found in ranks:
            assert_same_bytes(found["replicated"][name], value, name)


def moved(seed: int) -> parallel_llama.Llama:
    """A Llama of which every weight is multiplied by 1 + GAMMA or 1 - GAMMA."""
    model = parallel_llama.Llama()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(2, parameter.shape, generator=generator) * 2.0 - 1.0
            parameter.mul_(1.0 + GAMMA * signs)
    return model


def losses(model: parallel_llama.Llama) -> Tensor:
    convert(model, "nvfp4", keep_first=0, keep_last=1)
    return torch.tensor(parallel_llama.trained(model, set_step))


def test_a_llama_under_torchtitans_plan_trains_as_in_one_process(ranks):
    """Up to what sums in another order, as weights that are off by GAMMA, change in six steps in FP4."""
    one = losses(parallel_llama.Llama())
    bound = sum(float((losses(moved(seed)) - one).norm()) for seed in range(3))
    for found in ranks:
        difference = torch.tensor(found["llama"]["losses"]) - one
        assert abs(difference[0]) <= GAMMA * one[0]
        assert difference.norm() <= bound
    assert one[-1] < 0.6 * one[0]


def test_its_state_dict_is_that_of_the_model_and_every_layer_was_called(ranks):
    for found in ranks:
        state = parallel_llama.Llama().state_dict()
        assert list(found["llama"]["state"]) == list(state)
        for name, value in state.items():
            assert_same_bytes(found["llama"]["state"][name], value, name)
        assert found["llama"]["called"] == 2 * 7
        assert not found["llama"]["bypassed"]
        assert not found["llama"]["warnings"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "misaligned",
            "2 ranks cannot share out_features=64 .* must be a multiple of 128 .* got 32. .* exclude",
        ),
        ("half a block", "cannot share out_features=48 .* first_out must be a multiple of 16 .* got 24"),
        ("columns", "cannot share in_features=48 .* first_in must be a multiple of 16 .* got 24"),
        ("uneven", "out_features must be a multiple of the 2 ranks that share them, got 33. Use another"),
        ("statistics", "got amax policies, adaptive layouts or shared amaxes. Choose a recipe or a call"),
        ("feedback", "error feedback needs a layer's whole weight, .* Use a recipe without error_feedback"),
        ("blocks of 32", "cannot share out_features=32 .* must be a multiple of 32 .* got 16"),
        ("partial", r"must have one placement, Shard\(0\), .* got \(Partial\(sum\),\) and None. Shard the"),
        ("plain input", r"must be a DTensor on the same mesh, got a plain tensor \[16, 64\]. Shard the"),
        ("plain weight", r"takes DTensors, .* got one with placements \(Replicate.* \[16, 64\]. Shard the"),
        ("width", r"must be in_features=32, got shape \[16, 64\]. Pass an input of that width"),
    ],
)
def test_what_ranks_cannot_share_is_refused_on_all_of_them(ranks, what, message):
    for found in ranks:
        with pytest.raises(ValueError, match=message):
            raise ValueError(found["errors"][what])


def test_two_pairs_of_ranks_share_layers_that_fsdp2_shards(tmp_path):
    """Each pair has the operands of one process for its tokens; gradients are the means of both pairs."""
    found = results_of(Path(script.__file__), tmp_path, 2 * WORLD)
    for name in script.LAYERS:
        ones = [one_process(name, 64 + 32 * pair, pair) for pair in range(2)]
        exact = [exact_results(one)["weight"] for one in ones]
        value, bound = (torch.stack(parts).mean(0) for parts in zip(*map(fields, exact), strict=True))
        mean = ExactGemm(value, bound)
        for rank, results in enumerate(found):
            assert_slices(results[name], ones[rank // 2], name, rank % 2)
            mean.assert_near(results[name]["weight"])
            assert ("Shard(dim=0)", "Shard(dim=1)")[SPLIT[name]] in results[name]["placements"]["weight"]
    assert all(results["kept"] == [False] * 4 for results in found)
