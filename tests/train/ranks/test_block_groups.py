"""Blocks that share a gather."""

import pytest
import torch

from fourbits.model.lm import LanguageModel
from fourbits.model.presets import MODEL_PRESETS
from fourbits.train.parallel import ParallelConfig
from fourbits.train.ranks.block_groups import block_groups

ENOUGH = ParallelConfig().gather_weights


def weights_of(group):
    return sum(parameter.numel() for block in group for parameter in block.parameters())


@pytest.mark.parametrize("preset", ["tiny", "hybrid-1.2b", "transformer-1.2b", "hybrid-12b"])
def test_groups_keep_all_blocks_in_order_and_end_with_the_block_that_fills_them(preset):
    with torch.device("meta"):
        blocks = LanguageModel(MODEL_PRESETS[preset], seed=0).blocks
    groups = block_groups(blocks, ENOUGH)
    assert [block for group in groups for block in group] == list(blocks)
    assert all(weights_of(group) >= ENOUGH > weights_of(group[:-1]) for group in groups[:-1])


def test_blocks_of_a_1b_model_share_gathers_and_of_a_12b_model_only_the_small_ones_with_attention():
    with torch.device("meta"):
        small, large = (LanguageModel(MODEL_PRESETS[f"hybrid-{size}"], seed=0) for size in ("1.2b", "12b"))
    assert len(block_groups(small.blocks, ENOUGH)) <= len(small.blocks) / 2
    shared = [group for group in block_groups(large.blocks, ENOUGH) if len(group) > 1]
    assert len(shared) == MODEL_PRESETS["hybrid-12b"].pattern.count("*")
    assert all(len(group) == 2 for group in shared)


def test_without_a_size_each_block_is_a_group():
    with torch.device("meta"):
        blocks = LanguageModel(MODEL_PRESETS["tiny"], seed=0).blocks
    assert block_groups(blocks, 0) == [[block] for block in blocks]
