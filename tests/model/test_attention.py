from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fourbits.model.attention import attention_core
from fourbits.model.config import RopeScaling
from fourbits.model.rotary import frequencies, rotate, rotations

EPS = torch.finfo(torch.float32).eps


def explicit(q, k, v, head_dim, window=None):
    """Explicit causal attention in FP64, each query head with the key head of its group."""
    q, k, v = (x.double().unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / head_dim**0.5
    token = torch.arange(scores.shape[-1])
    distance = token[:, None] - token
    hidden = (distance < 0) | (distance >= (window or len(token)))
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


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


@pytest.mark.parametrize("window", [1, 2, 16, 32, 33, 100])
def test_a_window_hides_what_is_that_far_back(window):
    q, k, v = (torch.randn(2, 33, heads * 16) for heads in (6, 2, 2))
    found = attention_core(q, k, v, 16, None, None, window).double()
    torch.testing.assert_close(found, explicit(q, k, v, 16, window), rtol=0, atol=64 * EPS)


LLAMA3 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


@pytest.mark.parametrize(
    "scaling",
    [
        LLAMA3,
        RopeScaling(kind="llama3", factor=32.0, low_freq_factor=0.5, high_freq_factor=2, original_seq_len=64),
        RopeScaling(kind="linear", factor=2.5),
    ],
    ids=str,
)
def test_scaled_frequencies_are_those_of_transformers(scaling):
    named = {
        "rope_type": scaling.kind,
        "rope_theta": 5e5,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_seq_len,
    }
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, rope_parameters=named)
    wanted, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config)
    assert factor == 1
    found = frequencies(128, 5e5, scaling, torch.device("cpu"))
    # A power of FP32 numbers up to 5e5, by two formulas, and three roundings more.
    torch.testing.assert_close(found, wanted, rtol=16 * EPS, atol=0)
    plain = frequencies(128, 5e5, None, torch.device("cpu"))
    if scaling.kind == "llama3":
        same, divided = found == plain, found == plain / scaling.factor
        assert same.any() and divided.any() and (~same & ~divided).any(), "all three cases were tried"  # noqa: PT018
    else:
        assert torch.equal(found, plain / scaling.factor)


def test_scaled_rotations_compile_to_the_same_numbers():
    compiled = torch.compile(rotations, fullgraph=True, dynamic=False)
    position = torch.arange(64)
    wanted = rotations(position, 32, 1e4, LLAMA3)
    torch.testing.assert_close(compiled(position, 32, 1e4, LLAMA3), wanted, rtol=0, atol=64 * 16 * EPS)
    assert not torch.allclose(wanted, rotations(position, 32, 1e4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 0.0}, "factor must be positive, got 0.0"),
        ({"low_freq_factor": 4.0}, r"low_freq_factor must be positive and below high_freq_factor \(4.0\)"),
        ({"original_seq_len": 0}, "original_seq_len must be at least 1"),
    ],
)
def test_a_scaling_that_means_nothing_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(LLAMA3, **changes)
