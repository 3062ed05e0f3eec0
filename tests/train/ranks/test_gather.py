"""Each weight is gathered in the shortest format that its recipe allows; the log says which and why."""

import pytest
import torch
from torch import nn

from fourbits.linear.convert import convert
from fourbits.model.lm import LanguageModel
from fourbits.recipe.presets import get_recipe
from fourbits.settings import override
from fourbits.train.ranks.gather import Rounded, choose_formats, describe
from fourbits.train.ranks.gathered_shard import GatheredShard, plain
from model.shapes import small_config


def choices(recipe, ranks=2, **changes):
    with torch.device("meta"):
        model = LanguageModel(small_config("*-M-", **changes), seed=0)
    convert(model, recipe)
    return model, choose_formats(model, lambda name: ranks, lambda name: pytest.fail("no sample is taken"))


def test_quantized_layers_send_codes_and_others_bf16():
    model, found = choices("nvfp4")
    words = {name: choice.word for name, choice in found.items()}
    assert words["head.weight"] == "in BF16"
    assert words["blocks.0.mixer.q_proj.weight"] == "as codes and scales"
    assert "in FP32" not in words.values()
    assert set(found) == {
        f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, nn.Linear)
    }
    assert all(isinstance(model.get_parameter(name), GatheredShard) for name in found)
    assert not isinstance(model.embed.weight, GatheredShard)


def test_the_log_names_every_format_and_reason():
    _, found = choices("nvfp4-naive")
    lines = describe(found)
    assert len(lines) == 2
    assert lines[0].startswith(f"{len(found) - 1} of {len(found)} weights are gathered in BF16")
    assert lines[0].endswith(": Dgrad quantizes W along the other axis")
    assert lines[1].endswith(": its GEMMs are in BF16")


def test_layers_that_a_phase_changes_are_gathered_unquantized():
    recipe = get_recipe("nvfp4+late-forward").for_run(10, 0, 2)
    _, found = choices(recipe)
    assert {choice.word for choice in found.values()} == {"in BF16"}
    assert "a phase of the recipe's schedule may need the unquantized weight" in str(describe(found))


def test_a_tied_head_is_gathered_with_the_embedding():
    model, found = choices("bf16", tie_embeddings=True)
    assert found["head.weight"].word == "in FP32"
    assert found["head.weight"].why == "tied to the embedding"
    assert model.head.weight is model.embed.weight


def test_rows_that_do_not_divide_are_gathered_in_fp32():
    _, found = choices(override(get_recipe("nvfp4"), {"keep_bf16.last_blocks": 0}), ranks=11)
    for choice in found.values():
        assert choice.format is None
        assert "do not divide into 11" in choice.why


def test_splitting_and_moving_keep_the_format_and_other_operators_give_plain_tensors():
    format = Rounded()
    gathered = GatheredShard(torch.arange(32.0).view(8, 4), format)
    for shard in (
        *gathered.chunk(2),
        gathered.narrow(0, 2, 4),
        gathered.new_zeros(4, 4),
        torch.empty_like(gathered),
    ):
        assert isinstance(shard, GatheredShard)
        assert shard.format is format
    assert torch.equal(plain(gathered.chunk(2)[1]), torch.arange(16.0, 32.0).view(4, 4))
    assert type(gathered + 1) is torch.Tensor
    gathered.narrow(0, 0, 1).copy_(torch.zeros(1, 4))
    assert plain(gathered)[0].tolist() == [0.0] * 4
    assert plain(gathered)[1].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_a_rounded_weight_is_widened_into_the_same_memory_without_a_new_version():
    format, shard = Rounded(), torch.tensor([[1.0 + 2**-10, 2.0]])
    (sent,) = format.sent(shard)
    assert sent.dtype == torch.bfloat16
    first, freed = format.arrive((sent.clone(),), None)
    assert freed == (first,)
    assert torch.equal(first, torch.tensor([[1.0, 2.0]]))
    version, address = first._version, first.data_ptr()
    again, _ = format.arrive((2 * sent,), first)
    assert again is first
    assert torch.equal(first, torch.tensor([[2.0, 4.0]]))
    assert (first._version, first.data_ptr()) == (version, address)
