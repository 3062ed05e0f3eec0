"""The chunked SSD scan against the recurrence that defines it, one token at a time in FP64."""

import pytest
import torch

from fourbits.model.ops.ssd.op import ssd
from fourbits.model.ops.ssd.reference import ssd as recurrence
from support.decay_terms import LOWEST, roundings, term_sizes

EPS = torch.finfo(torch.float32).eps
NAMES = ("y", "dx", "ddt", "da", "db", "dc", "dd")
# B, T, H, P, G, N, chunk: the paper's head dims 64 and 80, odd and short lengths, one and several groups.
SHAPES = [
    (1, 200, 4, 64, 2, 16, 64),
    (2, 131, 4, 80, 1, 32, 32),
    (2, 37, 6, 16, 3, 8, 8),
    (1, 5, 2, 16, 2, 8, 64),
    (1, 64, 2, 16, 1, 8, 16),
]


def arguments(shape, strongest=8.0) -> tuple[torch.Tensor, ...]:
    batch, length, heads, head_dim, groups, states, _ = shape
    return (
        torch.randn(batch, length, heads, head_dim),
        torch.rand(batch, length, heads) * 0.2,
        -torch.rand(heads) * strongest - 0.1,
        torch.randn(batch, length, groups, states),
        torch.randn(batch, length, groups, states),
        torch.randn(heads),
    )


def scan(chunk_size):
    return lambda *args: ssd(*args, chunk_size=chunk_size)


def value_and_gradients(function, args, dtype, dy):
    args = [arg.to(dtype).requires_grad_() for arg in args]
    y = function(*args)
    return y, *torch.autograd.grad(y, args, dy.to(dtype))


def exact(args, dy) -> list[torch.Tensor]:
    return list(value_and_gradients(recurrence, args, torch.float64, dy))


def rms(x):
    return x.double().square().mean().sqrt()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_equal_the_recurrence(shape):
    args, dy = arguments(shape), torch.randn(shape[:4])
    found = value_and_gradients(scan(shape[-1]), args, torch.float64, dy)
    wanted = exact(args, dy)
    for name, x, y in zip(NAMES, found, wanted, strict=True):
        assert rms(x - y) <= 1e-13 * rms(y), name  # the same real numbers, in FP64's rounding


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strongest", [1.0, 16.0])
def test_fp32_chunks_are_as_accurate_as_fp32_sums(shape, strongest):
    args, dy = arguments(shape, strongest), torch.randn(shape[:4])
    found, wanted = value_and_gradients(scan(shape[-1]), args, torch.float32, dy), exact(args, dy)
    # Each entry of y, dx, db, dc is a sum of products with random signs: a few roundings of its own size. The
    # terms of a log-decay's gradient need not have random signs: a few roundings of the terms' sizes.
    allowed = {name: 8 * EPS * rms(true) for name, true in zip(NAMES, wanted, strict=True)}
    for name, terms in term_sizes(exact, args, dy).items():
        allowed[name] = roundings(args[1], args[2]) * EPS * rms(terms)
    for name, got, true in zip(NAMES, found, wanted, strict=True):
        assert got.dtype == torch.float32
        assert rms(got - true) <= allowed[name], name


def test_the_chunk_size_does_not_affect_the_result():
    args = [arg.double() for arg in arguments((2, 50, 4, 16, 2, 8, 0))]
    whole = scan(50)(*args)
    for chunk in (1, 7, 16, 64):
        torch.testing.assert_close(scan(chunk)(*args), whole, rtol=1e-12, atol=1e-12)


def test_tokens_after_a_reset_are_as_accurate_as_others():
    x, dt, a, b, c, d = arguments((1, 40, 2, 16, 1, 8, 16))
    dt[:, ::4] = 1e4  # exp(-dt |a|) is 0: the state is reset; a running FP32 sum would be off by 0.01
    dt[:, 1::4] = 1e-30  # and a token that writes nothing
    x[:, ::4] *= 1e-4
    dy = torch.randn(1, 40, 2, 16)
    args = (x, dt, a, b, c, d)
    found, wanted = value_and_gradients(scan(16), args, torch.float32, dy), exact(args, dy)
    sizes = dict(zip(NAMES, wanted, strict=True)) | term_sizes(exact, args, dy)
    for name, got, true in zip(NAMES, found, wanted, strict=True):
        assert got.isfinite().all(), name
        assert rms(got - true) <= 8 * EPS * rms(sizes[name]), name


# One head each: its rate, its smallest and largest time steps, and the distance of tokens that have them; the
# others have steps below 0.2. The largest exponent of one token is 53, so its decay is a normal FP32 number.
DECAYS = [
    (-16.0, (2.7, 3.3), 1),
    (-16.0, (0.9, 1.1), 1),
    (-16.0, (0.0, 0.2), 1),
    (-1.0, (0.0, 0.2), 1),
    (-0.1, (0.0, 0.02), 1),
    (-16.0, (2.7, 3.3), 8),
]


def test_gradients_of_decays_round_only_their_own_terms():
    chunk, length, head_dim, states = 128, 512, 16, 16
    x, dt, a, b, c, d = arguments((1, length, len(DECAYS), head_dim, 1, states, chunk))
    for head, (rate, steps, every) in enumerate(DECAYS):
        a[head] = rate
        dt[:, ::every, head].uniform_(*steps)
    args, dy = (x, dt, a, b, c, d), torch.randn(x.shape)
    found, wanted = value_and_gradients(scan(chunk), args, torch.float32, dy), exact(args, dy)
    # The worst case: every product and sum adds half an EPS. Terms are products of sums over head dim and
    # states, and are added over two tokens of a chunk and over chunks.
    worst = (head_dim + states + 2 * chunk + length // chunk + LOWEST) / 2
    for name, sizes in term_sizes(exact, args, dy).items():
        at = NAMES.index(name)
        for head, case in enumerate(DECAYS):
            error, terms = (found[at] - wanted[at])[..., head].abs(), sizes[..., head]
            assert (error <= worst * EPS * terms).all(), (name, case)
            assert rms(error) <= roundings(dt[..., head], a[head]) * EPS * rms(terms), (name, case)


def test_long_sequences_lose_no_more_than_short_ones():
    args = arguments((1, 4096, 1, 16, 1, 8, 32))
    args[2].fill_(-50.0)  # a running FP32 sum would reach 2e4 and be off by 1e-3
    found, wanted = scan(32)(*args), scan(32)(*[arg.double() for arg in args])
    assert rms(found[:, -64:] - wanted[:, -64:]) <= 8 * EPS * rms(wanted[:, -64:])


def test_the_future_changes_no_bit_of_the_past():
    x, dt, a, b, c, d = arguments((1, 40, 2, 16, 1, 8, 0))
    before = ssd(x, dt, a, b, c, d, 8)
    for tensor in (x, dt, b, c):
        tensor[:, 27:] = tensor[:, 27:] + 1
    assert torch.equal(ssd(x, dt, a, b, c, d, 8)[:, :27], before[:, :27])
