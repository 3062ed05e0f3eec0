import torch

from fourbits.model.attention import attention_core, rotate, rotations

EPS = torch.finfo(torch.float32).eps


def explicit(q, k, v, head_dim):
    """Explicit causal attention in FP64, each query head with the key head of its group."""
    q, k, v = (x.double().unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / head_dim**0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_grouped_heads_match_explicit_attention():
    q, k, v = (torch.randn(2, 33, heads * 16) for heads in (6, 2, 2))
    # Weights sum to one and values are about one: a few roundings of a sum of 33 terms.
    torch.testing.assert_close(
        attention_core(q, k, v, 16, None).double(), explicit(q, k, v, 16), rtol=0, atol=64 * EPS
    )


def test_bf16_attention_differs_by_one_rounding():
    q, k, v = (torch.randn(2, 33, 64).bfloat16() for _ in range(3))
    wanted = explicit(q, k, v, 16)
    found = attention_core(q, k, v, 16, None)
    assert found.dtype == torch.bfloat16
    # Half a unit in the last place, and as much again for a kernel that rounds its weights to BF16.
    limit = 2 * torch.finfo(torch.bfloat16).eps * wanted.abs().amax()
    assert (found.double() - wanted).abs().max() <= limit


def test_rotated_scores_depend_on_the_distance_only():
    q, k = torch.randn(1, 8, 3, 32), torch.randn(1, 8, 3, 32)

    def scores(shift):
        rotation = rotations(torch.arange(8) + shift, 32, 1e4)
        return torch.einsum("bqhp,bkhp->bhqk", rotate(q, rotation), rotate(k, rotation))

    for shift in (1, 100, 4000):
        # An angle of up to `shift` radians is rounded to FP32, which rotates a pair by up to eps * shift / 2.
        limit = (8 + shift) * EPS * q.norm(dim=-1).max() * k.norm(dim=-1).max()
        assert (scores(shift) - scores(0)).abs().max() <= limit


def test_rotation_preserves_lengths_and_does_not_change_position_zero():
    x = torch.randn(2, 5, 3, 16)
    rotated = rotate(x, rotations(torch.arange(5), 16, 1e4))
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotated[:, 0], x[:, 0])
    assert not torch.allclose(rotated[:, 1], x[:, 1])
