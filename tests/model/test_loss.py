from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fourbits.model import loss
from fourbits.model.loss import chunk_length, chunked_loss, summed_cross_entropy
from model.shapes import random_tokens, small_model

EPS = torch.finfo(torch.float32).eps


class Recorder(nn.Linear):
    """A head that records the number of rows of each call."""

    def __init__(self, *sizes):
        super().__init__(*sizes, bias=False)
        self.rows = []

    def forward(self, input):
        self.rows.append(len(input))
        return super().forward(input)


def problem(tokens=50, width=24, vocab=100):
    hidden = torch.randn(tokens, width, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    targets[::7] = -100
    return Recorder(width, vocab), hidden, targets


def run_chunked(head, hidden, targets, length):
    return chunked_loss(lambda h, t: summed_cross_entropy(head(h), t), head, hidden, targets, length)


@pytest.mark.parametrize("length", [50, 25, 13, 1])
def test_chunks_give_the_cross_entropy_of_full_logits_and_its_gradients(length):
    head, hidden, targets = problem()
    inputs = (hidden, head.weight)
    wanted = F.cross_entropy(head(hidden), targets, ignore_index=-100, reduction="sum") / 7
    wanted_grads = torch.autograd.grad(wanted, inputs)
    found = run_chunked(head, hidden, targets, length) / 7
    assert abs(found - wanted) <= 50 * EPS * abs(wanted)  # another order of a sum of 50
    for got, true in zip(torch.autograd.grad(found, inputs), wanted_grads, strict=True):
        # A sum over 100 logits or 50 tokens in another order.
        assert (got - true).norm() <= 16 * EPS * true.norm()


def test_the_head_never_sees_more_tokens_than_a_chunk():
    head, hidden, targets = problem()
    run_chunked(head, hidden, targets, 13).backward()
    assert head.rows == [13, 13, 13, 11]


def test_without_gradients_the_loss_has_the_same_bits():
    head, hidden, targets = problem()
    with torch.no_grad():
        evaluated = run_chunked(head, hidden, targets, 13)
    assert torch.equal(evaluated, run_chunked(head, hidden, targets, 13))
    assert not evaluated.requires_grad


def test_frozen_parameters_get_no_gradient():
    head, hidden, targets = problem()
    head.weight.requires_grad_(False)
    run_chunked(head, hidden, targets, 13).backward()
    assert head.weight.grad is None
    assert hidden.grad is not None


def test_ignored_targets_contribute_nothing():
    model = small_model("M-")
    tokens, targets = random_tokens(2, 12), random_tokens(2, 12)
    targets[0] = -100
    loss, count = model.loss(tokens, targets)
    alone, alone_count = model.loss(tokens[1:], targets[1:])
    assert count == alone_count == 12
    torch.testing.assert_close(loss, alone, rtol=1e-5, atol=0)
    nothing, none = model.loss(tokens, torch.full_like(targets, -100))
    nothing.backward()
    assert nothing == none == 0
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


@pytest.mark.parametrize("grad", [True, False])
def test_the_models_loss_holds_no_more_logits_than_a_chunk_may_have(grad, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 8 * 64)
    model, sizes = small_model("-"), []
    model.head.register_forward_hook(lambda _m, _i, logits: sizes.append(logits.numel()))
    with torch.set_grad_enabled(grad):
        model.loss(random_tokens(2, 12), random_tokens(2, 12))
    assert sizes == [8 * 64] * 3


@pytest.mark.parametrize("target", [-1, 64, 1 << 40])
def test_a_target_outside_the_vocabulary_makes_the_loss_nan(target):
    model = small_model("-")
    tokens, targets = random_tokens(2, 12), random_tokens(2, 12)
    targets[1, 5] = target
    assert model.loss(tokens, targets)[0].isnan()


@pytest.mark.parametrize("grad", [True, False])
def test_the_loss_of_bf16_chunks_is_summed_in_fp32(grad):
    """In BF16 the sum of 64 chunks of about 4 nats would be known to one or two."""
    model, tokens = small_model("-", dtype=torch.bfloat16), random_tokens(1, 64)
    rows, targets = model.hidden(tokens).flatten(0, 1).detach(), tokens.flatten()
    with torch.set_grad_enabled(grad):
        found = chunked_loss(model._loss_of, model.head, rows, targets, 1)
    wanted = F.cross_entropy(model.head(rows).double(), targets, reduction="sum")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=64 * EPS, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_the_models_loss_is_the_cross_entropy_of_its_logits(tied):
    model = small_model("M-*-", tie_embeddings=tied)
    tokens, targets = random_tokens(2, 12), random_tokens(2, 12)
    parameters = list(model.parameters())
    wanted = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten(), reduction="sum")
    found, count = model.loss(tokens, targets)
    assert count == 24
    torch.testing.assert_close(found, wanted, rtol=24 * EPS, atol=0)
    pairs = zip(torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters), strict=True)
    for got, true in pairs:
        assert (got - true).norm() <= 1e-5 * true.norm()  # FP32 through four blocks


def test_bf16_logits_give_a_gradient_within_bf16_of_the_exact_one():
    logits = (4 * torch.randn(20, 50)).bfloat16().requires_grad_()
    targets = torch.randint(50, (20,))
    exact = logits.detach().double().requires_grad_()
    wanted = F.cross_entropy(exact, targets, reduction="sum")
    found = summed_cross_entropy(logits, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=20 * EPS, atol=0)
    (got,) = torch.autograd.grad(found, logits)
    (true,) = torch.autograd.grad(wanted, exact)
    assert ((got - true).abs() <= torch.finfo(torch.bfloat16).eps * true.abs() + 1e-6).all()


def test_a_second_backward_pass_is_refused():
    head, hidden, targets = problem()
    loss = run_chunked(head, hidden, targets, 13)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


@pytest.mark.parametrize(
    ("tokens", "vocab", "limit", "length"),
    [
        (2048, 2048, 1 << 26, 2048),
        (32768, 131072, 1 << 26, 512),
        (32768, 131072, 1 << 29, 4096),
        (48, 10, 100, 8),
        (13, 10, 50, 5),
        (5, 10, 1, 1),
    ],
)
def test_chunks_respect_the_limit_and_are_equal_if_that_costs_little(tokens, vocab, limit, length):
    assert chunk_length(tokens, vocab, limit) == length
    assert length == 1 or length * vocab <= limit


def test_rounding_the_master_once_for_all_chunks_changes_no_bit(monkeypatch):
    model, tokens = small_model("-", dtype=torch.bfloat16), random_tokens(2, 13)

    def loss_and_gradient():
        rows, targets = model.hidden(tokens).flatten(0, 1), tokens.flatten()
        loss = chunked_loss(model._loss_of, model.head, rows, targets, 5)
        return loss.detach(), torch.autograd.grad(loss, model.head.weight)[0]

    found = loss_and_gradient()
    assert model.head._rounded is None
    monkeypatch.setattr(type(model.head), "rounded_once", lambda head, dtype: nullcontext())
    for got, wanted in zip(found, loss_and_gradient(), strict=True):
        assert torch.equal(got, wanted)
