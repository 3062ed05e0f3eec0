"""Log-likelihoods are those of the model's own logits, whatever the batch, and equal inputs are read once."""

import pytest
import torch

from fourbits.harness.scoring import Passage, score
from fourbits.model.lm import LanguageModel
from support.small_models import hybrid_model

PASSAGES = [
    Passage((3, 5, 7, 11, 13), 2),
    Passage((3, 5, 9), 1),
    Passage((3, 5, 8), 1),
    Passage((3, 5, 8, 2), 3),
    Passage(tuple(range(20, 50)), 29),
    Passage((4, 4), 1),
]


@pytest.fixture(scope="module")
def model():
    config = hybrid_model(vocab_size=128, max_seq_len=40)
    return LanguageModel(config, compute_dtype=torch.float32)


def by_hand(model, passage, num_ids=None):
    tokens = torch.tensor([passage.tokens[-41:]])
    with torch.no_grad():
        logits = model(tokens[:, :-1])[0, :, :num_ids].double()
    targets = tokens[0, 1:]
    chosen = logits.log_softmax(-1).gather(1, targets[:, None])[-passage.scored :, 0]
    return float(chosen.sum()), bool((logits.argmax(-1) == targets)[-passage.scored :].all())


@pytest.mark.parametrize("batch_tokens", [1, 60, 1 << 14])
@pytest.mark.parametrize("num_ids", [None, 64])
def test_scores_are_the_sums_of_the_models_log_probabilities(model, batch_tokens, num_ids):
    found = score(model, PASSAGES, num_ids=num_ids, batch_tokens=batch_tokens)
    for passage, one in zip(PASSAGES, found, strict=True):
        value, greedy = by_hand(model, passage, num_ids)
        # FP32 logits of another batch: a few roundings of sums of 64 products of size one, per token
        assert one.log_likelihood == pytest.approx(value, abs=passage.scored * 64 * 2**-23)
        assert one.greedy == greedy


def test_the_most_likely_continuation_is_greedy_and_no_other(model):
    with torch.no_grad():
        best = int(model(torch.tensor([[3, 5]]))[0, -1].argmax())
    found = score(model, [Passage((3, 5, token), 1) for token in range(128)])
    assert [token for token in range(128) if found[token].greedy] == [best]


def test_choices_of_one_token_share_one_pass_over_their_question(model):
    choices = [Passage((3, 5, 7, token), 1) for token in range(10)]
    seen: list[tuple[int, int]] = []
    alone = score(model, choices[:1])[0]
    found = score(model, choices, on_progress=lambda done, count: seen.append((done, count)))
    assert seen == [(1, 1)]
    assert found[0] == alone
    assert len({one.log_likelihood for one in found}) == 10


def test_only_the_last_tokens_that_the_model_reads_count(model):
    long = tuple(range(100))
    (cut,) = score(model, [Passage(long, 3)])
    assert cut == score(model, [Passage(long[-41:], 3)])[0]


@pytest.mark.parametrize(
    ("tokens", "scored", "got"),
    [((1, 2), 0, "got 0"), ((1, 2), 2, "got 2"), (tuple(range(60)), 41, "got 41")],
)
def test_a_continuation_without_context_or_too_long_is_refused(model, tokens, scored, got):
    with pytest.raises(ValueError, match=f"at most max_seq_len = 40.*{got}"):
        score(model, [Passage(tokens, scored)])
