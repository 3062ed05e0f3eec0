"""No block sees the future, and every mixer that should see the past does."""

import pytest
import torch

from model.shapes import random_tokens, small_model

PATTERNS = ["M", "*", "-", "T", "M-*-", "TM"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rope_theta", [None, 1e4])
def test_a_token_changes_no_logit_before_it(pattern, rope_theta):
    model = small_model(pattern, rope_theta=rope_theta)
    tokens = random_tokens(2, 21)
    before = model(tokens)
    for position in (0, 7, 8, 20):  # including chunk boundaries of the scan
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 64
        after = model(changed)
        assert torch.equal(before[:, :position], after[:, :position])
        assert not torch.equal(before[:, position], after[:, position])


@pytest.mark.parametrize(("pattern", "mixes"), [("M", True), ("*", True), ("-", False), ("T", True)])
def test_mixers_see_the_past_and_an_ffn_does_not(pattern, mixes):
    model = small_model(pattern)
    tokens = random_tokens(1, 21)
    changed = tokens.clone()
    changed[:, 2] = (changed[:, 2] + 1) % 64
    assert torch.equal(model(tokens)[:, 20], model(changed)[:, 20]) != mixes


def test_sequences_of_a_batch_are_independent():
    model = small_model("M-*-T")
    tokens = random_tokens(3, 21)
    alone = model(tokens[1:2])
    # Kernels may sum in another order for another batch size.
    torch.testing.assert_close(model(tokens)[1:2], alone, rtol=1e-4, atol=1e-5)
