"""The scan's kernels without a card: right in Triton's interpreter, compiled for every card, and refused."""

import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fourbits.model import mixer_check, ssd_check, ssd_op, ssd_triton, ssd_tuning
from fourbits.model.conv import conv_silu
from fourbits.model.gated_norm import gated_group_norm
from fourbits.model.ssd import ssd
from support.kernel_builds import on_gpu, recording, stack_bytes
from support.triton_interpreter import run

#: registers of a thread that a kernel may spill on sm_90
SPILLED = 8
CARDS = {90: ("_LARGE", 227), 100: ("_LARGE", 227), 120: ("_SMALL", 99)}


def test_kernels_are_the_recurrence_in_fp32():
    result = run("ssd_cases")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("card", "head_dim", "states"),
    [(90, 64, 128), (90, 80, 128), (90, 64, 256), (100, 64, 128), (120, 80, 128)],
)
def test_kernels_multiply_on_tensor_cores_within_a_cards_memory(card, head_dim, states):
    tuning, kibibytes = getattr(ssd_tuning, CARDS[card][0]), CARDS[card][1]
    x, b = on_gpu(1, 512, 32, head_dim), on_gpu(1, 512, 2, states)
    dt, a = on_gpu(1, 512, 32, dtype=torch.float32), on_gpu(32, dtype=torch.float32)
    with recording(ssd_triton) as starts:
        ssd_triton.forward(x, dt, a, b, b, a, None, tuning["forward"])
        ssd_triton.backward(x, x, dt, a, b, b, a, None, tuning["backward"])
    instruction = {90: r"wgmma\.mma_async", 100: r"tcgen05\.mma", 120: r"mma\.sync"}[card]
    for start in starts:
        built = start.build(card)
        name = start.kernel.__name__
        assert built.metadata.shared <= kibibytes << 10, name
        if (card, states) == (90, 128):  # 162 spilled registers once made a kernel three times as slow
            assert stack_bytes(built) <= 4 * SPILLED, name
        if name not in ("decays_kernel", "steps_kernel"):
            assert re.search(instruction, built.asm["ptx"]), name
            assert re.search(r"(ld\.global|cp\.async)\S*\.v4|cp\.async\.cg\.shared\.global", built.asm["ptx"])


def test_what_has_no_kernel_is_named(monkeypatch):
    cpu, card = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "NVIDIA cards, x is on cpu" in str(ssd_op.why_no_kernel(cpu, torch.bfloat16, 64, 128))
    assert "sm_80 or newer, this is sm_75" in str(ssd_op.why_no_kernel(card, torch.bfloat16, 64, 128))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert ssd_op.why_no_kernel(card, torch.bfloat16, 80, 128) is None
    assert "activations are torch.float32" in str(ssd_op.why_no_kernel(card, torch.float32, 64, 128))
    assert "got 64 x 24" in str(ssd_op.why_no_kernel(card, torch.bfloat16, 64, 24))
    monkeypatch.setattr(ssd_op, "installed_triton", lambda: "3.4.0")
    assert "Triton 3.4.0 is older" in str(ssd_op.why_no_kernel(card, torch.bfloat16, 64, 128))


@pytest.fixture
def on_this_machine(monkeypatch):
    """A CPU that passes for a card, with torch in FP32 in the place of its kernels."""

    def scan(x, dt, a, b, c, d, starts):
        return ssd(x.float(), dt, a, b.float(), c.float(), d, 64, starts).to(x.dtype)

    def conv(x, taps, bias, documents, widths, fused):
        return tuple(y.to(x.dtype) for y in conv_silu(x, taps, bias, documents, widths))

    def norm(y, z, weight, num_groups, eps, fused):
        return gated_group_norm(y, z, weight, num_groups, eps).to(y.dtype)

    monkeypatch.setattr(ssd_check, "ssd_forward", scan)
    monkeypatch.setattr(mixer_check, "conv_silu", conv)
    monkeypatch.setattr(mixer_check, "gated_group_norm", norm)
    monkeypatch.setattr(ssd_check, "_decided", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return monkeypatch


def test_kernels_that_are_right_pass_the_self_check(on_this_machine):
    shares = ssd_check.check(torch.device("cpu"), torch.bfloat16, 64, 128)
    assert list(shares)[:7] == ["y", "dx", "ddt", "da", "db", "dc", "dd"]
    assert len(shares) == 7 + 4 + 4
    assert all(share <= 1 for share in shares.values())
    assert all(shares[name] > 0 for name in list(shares)[:7])


@pytest.mark.parametrize("wrong", ["x", "dt", "a", "b", "c", "d"])
def test_a_wrong_gradient_stops_the_model_with_its_name(on_this_machine, wrong):
    scan = ssd_check.ssd_forward

    def broken(*args):
        named = dict(zip(("x", "dt", "a", "b", "c", "d", "starts"), args, strict=True))
        named[wrong] = 0.98 * named[wrong] + 0.02 * named[wrong].detach()  # the same value
        return scan(**named)

    on_this_machine.setattr(ssd_check, "ssd_forward", broken)
    with pytest.raises(RuntimeError, match=rf"larger than BF16 allows: d{wrong} 2\.\d* times\. Do not train"):
        ssd_check._check(torch.device("cpu"), torch.bfloat16, 64, 128)


@pytest.mark.parametrize(
    ("function", "place", "name"),
    [
        ("conv_silu", 0, "convolution's dx"),
        ("conv_silu", 1, "dtaps"),
        ("conv_silu", 2, "dbias"),
        ("gated_group_norm", 0, "norm's dy"),
        ("gated_group_norm", 1, "norm's dz"),
        ("gated_group_norm", 2, "norm's dweight"),
    ],
)
def test_a_wrong_gradient_beside_the_scan_stops_the_model_too(on_this_machine, function, place, name):
    right = getattr(mixer_check, function)

    def broken(*args, fused):
        args = list(args)
        if fused:  # the same value, and 0.98 of the gradient
            args[place] = 0.98 * args[place] + 0.02 * args[place].detach()
        return right(*args, fused=fused)

    on_this_machine.setattr(mixer_check, function, broken)
    with pytest.raises(RuntimeError, match=rf"larger than BF16 allows: {name} 2\.\d* times\. Do not train"):
        ssd_check._check(torch.device("cpu"), torch.bfloat16, 64, 128)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_the_self_check_needs_no_gradients_around_it(on_this_machine, around):
    with around():
        ssd_check._check(torch.device("cpu"), torch.bfloat16, 16, 16)


def test_the_self_check_leaves_no_trace_in_a_checkpoint_around_it(on_this_machine):
    first = []

    def block(x):
        if not first:
            ssd_check._check(torch.device("cpu"), torch.bfloat16, 16, 16)
        first.append(True)
        return (x * x).sin()

    x = torch.randn(4, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=False)
    (found,) = torch.autograd.grad(y.sum(), x)  # raises if the second run saves fewer tensors
    assert len(first) == 2
    assert torch.equal(found, (x * x).cos() * 2 * x)


def test_fp32_and_a_cpu_are_scanned_without_kernels_and_words(on_this_machine):
    assert not ssd_check.is_fused(torch.device("cpu"), torch.bfloat16, 64, 128)
    assert not ssd_check.is_fused(torch.device("cuda"), torch.float32, 64, 128)


def test_a_card_without_kernels_is_announced_once(on_this_machine):
    on_this_machine.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.warns(UserWarning, match="plain torch, in FP32 and slower: the scan's kernels need sm_80"):
        assert not ssd_check.is_fused(torch.device("cuda"), torch.bfloat16, 64, 128)
    assert not ssd_check.is_fused(torch.device("cuda"), torch.bfloat16, 64, 128)  # no second warning


def test_no_kernel_is_checked_while_a_graph_is_captured(on_this_machine):
    on_this_machine.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="Run the model once before"):
        ssd_check._check(torch.device("cpu"), torch.bfloat16, 64, 128)
