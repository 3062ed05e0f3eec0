"""The SSD scan's kernels without a GPU: correct in the interpreter, compiled for every GPU, and refused."""

import dataclasses
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fourbits.device import probe
from fourbits.model.ops import self_check
from fourbits.model.ops.conv.op import conv_silu
from fourbits.model.ops.gated_norm.op import gated_group_norm
from fourbits.model.ops.ssd import op as ssd_op
from fourbits.model.ops.ssd.kernels import launch_config, ssd_triton
from fourbits.model.ops.ssd.op import ssd
from support.kernel_builds import on_gpu, recording, stack_bytes
from support.triton_interpreter import run

#: registers per thread that a kernel may spill on sm_90
SPILLED = 8
#: compute capability -> launch configuration and KiB of shared memory
GPUS = {90: ("_LARGE", 227), 100: ("_LARGE", 227), 120: ("_SMALL", 99)}


def test_kernels_are_the_recurrence_in_fp32():
    result = run("ssd_cases")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("sm", "head_dim", "states"),
    [(90, 64, 128), (90, 80, 128), (90, 64, 256), (100, 64, 128), (120, 80, 128)],
)
def test_kernels_use_tensor_cores_and_fit_in_shared_memory(sm, head_dim, states):
    config, kibibytes = getattr(launch_config, GPUS[sm][0]), GPUS[sm][1]
    x, b = on_gpu(1, 512, 32, head_dim), on_gpu(1, 512, 2, states)
    dt, a = on_gpu(1, 512, 32, dtype=torch.float32), on_gpu(32, dtype=torch.float32)
    with recording(ssd_triton) as starts:
        ssd_triton.forward(x, dt, a, b, b, a, None, config["forward"])
        ssd_triton.backward(x, x, dt, a, b, b, a, None, config["backward"])
    instruction = {90: r"wgmma\.mma_async", 100: r"tcgen05\.mma", 120: r"mma\.sync"}[sm]
    for start in starts:
        built = start.build(sm)
        name = start.kernel.__name__
        assert built.metadata.shared <= kibibytes << 10, name
        if (sm, states) == (90, 128):  # a kernel with 162 spilled registers was three times as slow
            assert stack_bytes(built) <= 4 * SPILLED, name
        if name not in ("decays_kernel", "steps_kernel"):
            assert re.search(instruction, built.asm["ptx"]), name
            assert re.search(r"(ld\.global|cp\.async)\S*\.v4|cp\.async\.cg\.shared\.global", built.asm["ptx"])


def gpu(capability, triton="3.6.0"):
    """A probe that describes an NVIDIA GPU whatever device is given."""
    return lambda device: dataclasses.replace(
        probe("cpu"), kind="cuda", name="a GPU", capability=capability, triton_version=triton
    )


def test_a_scan_that_the_kernels_do_not_support_is_refused_with_the_reason(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)

    def reason(device, dtype, head_dim, states):
        return str(ssd_op.unsupported(device, dtype, head_dim, states))

    assert re.search("need an NVIDIA GPU, this is .* CPU", reason(cpu, torch.bfloat16, 64, 128))
    monkeypatch.setattr(ssd_op, "probe", gpu((7, 5)))
    assert "need sm_80 or newer, this is a GPU (sm_75)" in reason(cuda, torch.bfloat16, 64, 128)
    monkeypatch.setattr(ssd_op, "probe", gpu((9, 0)))
    assert ssd_op.unsupported(cuda, torch.bfloat16, 80, 128) is None
    assert "BF16 activations, got torch.float32" in reason(cuda, torch.float32, 64, 128)
    assert "got 64 x 24" in reason(cuda, torch.bfloat16, 64, 24)
    monkeypatch.setattr(ssd_op, "probe", gpu((9, 0), "3.4.0"))
    assert "Triton 3.4.0 is older" in reason(cuda, torch.bfloat16, 64, 128)


@pytest.fixture
def fake_kernels(monkeypatch):
    """FP32 PyTorch in the place of the kernels, so that a CPU can take the place of a GPU."""

    def scan(x, dt, a, b, c, d, starts):
        return ssd(x.float(), dt, a, b.float(), c.float(), d, 64, starts).to(x.dtype)

    def conv(x, taps, bias, documents, widths, fused):
        return tuple(y.to(x.dtype) for y in conv_silu(x, taps, bias, documents, widths))

    def norm(y, z, weight, num_groups, eps, fused):
        return gated_group_norm(y, z, weight, num_groups, eps).to(y.dtype)

    monkeypatch.setattr(self_check, "ssd_forward", scan)
    monkeypatch.setattr(self_check, "conv_silu", conv)
    monkeypatch.setattr(self_check, "gated_group_norm", norm)
    monkeypatch.setattr(self_check, "_decisions", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return monkeypatch


def test_correct_kernels_pass_the_self_check(fake_kernels):
    shares = self_check.check(torch.device("cpu"), torch.bfloat16, 64, 128)
    assert list(shares)[:7] == ["y", "dx", "ddt", "da", "db", "dc", "dd"]
    assert len(shares) == 7 + 4 + 4
    assert all(share <= 1 for share in shares.values())
    assert all(shares[name] > 0 for name in list(shares)[:7])


@pytest.mark.parametrize("wrong", ["x", "dt", "a", "b", "c", "d"])
def test_a_wrong_gradient_of_the_scan_stops_the_model_with_its_name(fake_kernels, wrong):
    scan = self_check.ssd_forward

    def broken(*args):
        named = dict(zip(("x", "dt", "a", "b", "c", "d", "starts"), args, strict=True))
        named[wrong] = 0.98 * named[wrong] + 0.02 * named[wrong].detach()  # the same value
        return scan(**named)

    fake_kernels.setattr(self_check, "ssd_forward", broken)
    with pytest.raises(RuntimeError, match=rf"larger than BF16 allows: d{wrong} 2\.\d* times\. Do not train"):
        self_check._require_correct(torch.device("cpu"), torch.bfloat16, 64, 128)


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
def test_a_wrong_gradient_of_convolution_or_norm_stops_the_model_too(fake_kernels, function, place, name):
    right = getattr(self_check, function)

    def broken(*args, fused):
        args = list(args)
        if fused:  # the same value, and 0.98 of the gradient
            args[place] = 0.98 * args[place] + 0.02 * args[place].detach()
        return right(*args, fused=fused)

    fake_kernels.setattr(self_check, function, broken)
    with pytest.raises(RuntimeError, match=rf"larger than BF16 allows: {name} 2\.\d* times\. Do not train"):
        self_check._require_correct(torch.device("cpu"), torch.bfloat16, 64, 128)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_the_self_check_works_where_gradients_are_off(fake_kernels, around):
    with around():
        self_check._require_correct(torch.device("cpu"), torch.bfloat16, 16, 16)


def test_the_self_check_does_not_affect_activation_checkpointing_around_it(fake_kernels):
    first = []

    def block(x):
        if not first:
            self_check._require_correct(torch.device("cpu"), torch.bfloat16, 16, 16)
        first.append(True)
        return (x * x).sin()

    x = torch.randn(4, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=False)
    (found,) = torch.autograd.grad(y.sum(), x)  # raises if the second run saves fewer tensors
    assert len(first) == 2
    assert torch.equal(found, (x * x).cos() * 2 * x)


def test_fp32_and_a_cpu_are_scanned_without_kernels_or_warnings(fake_kernels):
    assert not self_check.use_kernels(torch.device("cpu"), torch.bfloat16, 64, 128)
    assert not self_check.use_kernels(torch.device("cuda"), torch.float32, 64, 128)


def test_a_gpu_that_cannot_run_the_kernels_gets_one_warning(fake_kernels):
    fake_kernels.setattr(ssd_op, "probe", gpu((7, 5)))
    with pytest.warns(UserWarning, match="plain PyTorch, in FP32 and slower: Triton kernels need sm_80"):
        assert not self_check.use_kernels(torch.device("cuda"), torch.bfloat16, 64, 128)
    assert not self_check.use_kernels(torch.device("cuda"), torch.bfloat16, 64, 128)  # no second warning


def test_no_kernel_is_checked_while_a_cuda_graph_is_captured(fake_kernels):
    fake_kernels.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="Run the model once before the capture"):
        self_check._require_correct(torch.device("cpu"), torch.bfloat16, 64, 128)
