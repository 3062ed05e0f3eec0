"""Attention within documents and windows: the blocks it computes, and the numbers of the whole mask."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourbits.model.attention import attention_core
from fourbits.model.documents import same_document
from fourbits.model.masked_attention import BLOCK, by_blocks, by_mask, visible_blocks, visible_pairs

EPS = torch.finfo(torch.float32).eps


def documents_ending_at(ends: set[int], length: int) -> torch.Tensor:
    """Document numbers [length] where each of `ends` is a last token."""
    last = torch.tensor([position in ends for position in range(-1, length - 1)])
    return last.cumsum(0, dtype=torch.int32)


WINDOWS = st.one_of(
    st.none(), st.integers(1, 600), st.sampled_from([1, 127, 128, 129, 130, 255, 256, 257, 383, 384])
)


@given(st.lists(st.sets(st.integers(0, 511), max_size=6), min_size=1, max_size=3), WINDOWS)
def test_the_blocks_are_those_of_the_mask(ends, window):
    # Ends anywhere, and at the borders of blocks and beside them.
    edges = {place for border in (128, 256) for place in (border - 2, border - 1, border)}
    documents = torch.stack([documents_ending_at(own, 512) for own in (*ends, edges)])
    token = torch.arange(512)
    distance = token[:, None] - token
    wanted = same_document(documents) & (distance >= 0) & (distance < (window or 512))
    assert torch.equal(visible_pairs(documents, window), wanted)
    tiles = wanted.unflatten(1, (4, BLOCK)).unflatten(3, (4, BLOCK)).transpose(2, 3)  # [B, N, N, 128, 128]
    some, whole = tiles.any(-1).any(-1), tiles.all(-1).all(-1)
    blocks = visible_blocks(documents, window)
    for counts, numbers, chosen in (
        (blocks.kv_num_blocks, blocks.kv_indices, some & ~whole),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices, whole),
    ):
        assert counts is not None
        assert numbers is not None
        found = [
            [set(row[:count].tolist()) for count, row in zip(*rows, strict=True)]
            for rows in zip(counts[:, 0], numbers[:, 0], strict=True)
        ]
        assert found == [[set(row.nonzero()[:, 0].tolist()) for row in one] for one in chosen]
    visible = blocks.mask_mod(torch.tensor(0), torch.tensor(0), token[:, None], token)
    assert torch.equal(visible, wanted[0])


@pytest.mark.parametrize("window", [None, 150])
def test_blocks_give_what_the_mask_gives_compiled(window):
    """Forwards, which is what PyTorch compiles for a CPU; with grouped heads."""
    q, k, v = (torch.randn(2, heads, 256, 16) for heads in (4, 2, 2))
    documents = torch.stack([documents_ending_at({5, 127, 200}, 256), documents_ending_at({130}, 256)])
    compiled = torch.compile(by_blocks, fullgraph=True, dynamic=False)
    with torch.no_grad():
        # Weights sum to one and values are about one: a few roundings of a sum of 256 terms.
        torch.testing.assert_close(
            compiled(q, k, v, documents, window), by_mask(q, k, v, documents, window), rtol=0, atol=64 * EPS
        )


def run(function, inputs, grad):
    """The result and the gradients of q, k and v, and the largest amount of memory it took, in bytes."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = function(*inputs)
    y.backward(grad)
    peak = torch.cuda.max_memory_allocated() - before
    assert all(x.grad is not None for x in inputs[:3])
    return [y.detach(), *(x.grad for x in inputs[:3] if x.grad is not None)], peak


def packed(batch, length, heads, groups, width):
    """q, k, v, documents and a gradient, on the GPU in BF16, in the layout of `attention_core`."""
    q, k, v, grad = (
        torch.randn(batch, length, count * width, device="cuda", dtype=torch.bfloat16)
        for count in (heads, groups, groups, heads)
    )
    ends = [{length // 3, length // 3 + 1, length // 2, length - 2}] * (batch - 1) + [set[int]()]
    documents = torch.stack([documents_ending_at(own, length) for own in ends]).cuda()
    return (q, k, v, documents), grad


def core(q, k, v, documents, window=None):
    return attention_core(q, k, v, 64, None, documents, window)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("window", [None, 200])
def test_blocks_on_a_gpu_are_as_close_to_fp32_as_the_mask(groups, window):
    inputs, grad = packed(2, 1024, 8, groups, 64)
    own = partial(core, window=window)
    exact, _ = run(own, [x.float() if x.is_floating_point() else x for x in inputs], grad.float())
    by_masks, _ = run(own, inputs, grad)
    compiled = torch.compile(own, fullgraph=True, dynamic=False)
    found, _ = run(compiled, inputs, grad)
    for wanted, mask, block in zip(exact, by_masks, found, strict=True):
        # Both round weights and results to BF16 and sum in FP32: alike, but for kernels that round once more.
        assert (block - wanted).norm() <= 2 * (mask - wanted).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1024])
def test_blocks_on_a_gpu_hold_nothing_of_the_size_of_the_mask(window):
    length = 8192
    inputs, grad = packed(1, length, 8, 8, 64)
    own = partial(core, window=window)
    compiled = torch.compile(own, fullgraph=True, dynamic=False)
    run(compiled, inputs, grad)
    _, peak = run(compiled, inputs, grad)
    _, with_mask = run(own, inputs, grad)
    # All else is O(T): q, k, v, y and their gradients, 8 MiB each, some of them twice, a few in FP32.
    assert with_mask > length**2
    assert peak < with_mask - length**2
