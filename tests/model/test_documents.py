"""Packed documents are independent: each gives the outputs it would give alone, to the last bit."""

from itertools import pairwise

import pytest
import torch

from fourbits.model.config import ModelConfig
from fourbits.model.documents import begins_document, document_numbers, same_as_before
from fourbits.model.ops.ssd.chunked import RESET
from fourbits.model.ops.ssd.op import ssd
from fourbits.model.ops.ssd.reference import ssd as recurrence
from model.shapes import random_tokens, small_config, small_model

END = 0
PATTERNS = ["M", "*", "T", "M-*-"]
# Ends inside a chunk of 8, at its border, twice in a row, and one document over several chunks.
ENDS = (2, 7, 8, 27)
LENGTH = 37


def packed(batch: int = 2) -> torch.Tensor:
    tokens = random_tokens(batch, LENGTH).clamp(min=1)
    tokens[:, list(ENDS)] = END
    return tokens


def spans() -> list[slice]:
    borders = [0, *(end + 1 for end in ENDS), LENGTH]
    return [slice(first, last) for first, last in pairwise(borders)]


def test_documents_are_counted_by_the_end_tokens_before_them():
    tokens = torch.tensor([[5, END, 6, 7, END, END, 8], [END, 1, 2, 3, 4, 5, 6]])
    documents = document_numbers(tokens, END)
    assert documents.tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    first = [[True, False, True, False, False, True, True], [True, True, *[False] * 5]]
    assert begins_document(documents).tolist() == first
    assert same_as_before(documents, 2)[0].tolist() == [False, False, False, False, True, False, False]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rope_theta", [None, 1e4])
@pytest.mark.parametrize("window", [None, 6])
def test_packed_documents_give_the_outputs_of_each_one_alone(pattern, rope_theta, window):
    model = small_model(pattern, rope_theta=rope_theta, sliding_window=window, document_end=END)
    tokens = packed()
    together = model(tokens)
    for span in spans():
        # The same FP32 sums over other lengths, in another order: logits of size 1, as for other batch sizes.
        torch.testing.assert_close(together[:, span], model(tokens[:, span]), rtol=1e-4, atol=1e-5)
    apart = small_model(pattern, rope_theta=rope_theta, sliding_window=window)(tokens)
    assert not torch.allclose(apart[:, 3:], together[:, 3:], atol=1e-3)  # without end tokens they do interact


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_are_the_sum_of_those_of_each_document(pattern):
    model = small_model(pattern, document_end=END)
    tokens, targets = packed(), random_tokens(2, LENGTH)
    parameters = list(model.parameters())
    together = torch.autograd.grad(model.loss(tokens, targets)[0], parameters)
    losses = [model.loss(tokens[:, span], targets[:, span])[0] for span in spans()]
    alone = torch.autograd.grad(torch.stack(losses).sum(), parameters)
    for found, wanted in zip(together, alone, strict=True):
        # Sums of 74 tokens' terms in FP32, in another order: 74 roundings of 2^-24 of one each, five-fold.
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=5 * 74 * 2**-24 * float(wanted.abs().max()))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_bit_of_a_document_reaches_the_next(pattern):
    model = small_model(pattern, document_end=END)
    tokens = packed()
    changed = tokens.clone()
    changed[:, :2] = 1 + changed[:, :2] % 63
    first, second = model(tokens), model(changed)
    assert not torch.equal(first[:, :3], second[:, :3])
    assert torch.equal(first[:, 3:], second[:, 3:])


@pytest.mark.parametrize("chunk_size", [4, 8, 64])
def test_the_scan_resets_its_state_at_document_starts(chunk_size):
    args = (
        torch.randn(2, LENGTH, 4, 16, dtype=torch.float64),
        torch.rand(2, LENGTH, 4, dtype=torch.float64),
        -torch.rand(4, dtype=torch.float64) - 0.1,
        torch.randn(2, LENGTH, 2, 8, dtype=torch.float64),
        torch.randn(2, LENGTH, 2, 8, dtype=torch.float64),
        torch.randn(4, dtype=torch.float64),
    )
    args = tuple(arg.requires_grad_() for arg in args)
    x, dt, a, b, c, d = args
    starts = torch.zeros(2, LENGTH, dtype=torch.bool)
    starts[:, [span.start for span in spans()]] = True
    found = ssd(x, dt, a, b, c, d, chunk_size, starts)
    wanted = torch.cat([recurrence(x[:, s], dt[:, s], a, b[:, s], c[:, s], d) for s in spans()], dim=1)
    dy = torch.randn_like(wanted)
    # Exponents are differences of sums near 5 * RESET, rounded to 2^-53 of them, a few times over.
    tolerance = 8 * len(spans()) * abs(RESET) * 2**-53
    for one, other in zip(
        (found, *torch.autograd.grad(found, args, dy)),
        (wanted, *torch.autograd.grad(wanted, args, dy)),
        strict=True,
    ):
        assert (one - other).norm() <= tolerance * other.norm()


def test_an_end_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="document_end must be a token below vocab_size = 64, got 64"):
        small_config(document_end=64)
    assert isinstance(small_config(document_end=63), ModelConfig)
