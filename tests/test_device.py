"""The choice of a backend for fabricated devices, and the description of this machine."""

import dataclasses
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from fourbits.cli.main import main
from fourbits.device import (
    Backend,
    Device,
    choose_backend,
    idle_nvidia_gpu,
    peak_flops,
    probe,
    unsupported_fp4,
    unsupported_triton,
)

CPU = Device(
    kind="cpu",
    name="x86_64 CPU (AVX2)",
    capability=None,
    memory_bytes=8 << 30,
    torch_version="2.13.0",
    triton_version=None,
    cpp_compiler="/usr/bin/g++",
)


def gpu(
    name: str, capability: tuple[int, int] | None, triton: str | None = "3.6.0", kind: str = "cuda"
) -> Device:
    return dataclasses.replace(CPU, kind=kind, name=name, capability=capability, triton_version=triton)


H100 = gpu("NVIDIA H100 80GB HBM3", (9, 0))
B200 = gpu("NVIDIA B200", (10, 0))


@pytest.mark.parametrize(
    ("device", "backend", "reason"),
    [
        (CPU, Backend.EMULATED, "the compiled reference and dequantized operands on the CPU"),
        (
            dataclasses.replace(CPU, cpp_compiler=None),
            Backend.EMULATED,
            "no C++ compiler found (install g++)",
        ),
        (H100, Backend.EMULATED, "fused Triton kernels, and BF16 tensor cores on dequantized operands"),
        (gpu("NVIDIA A100-SXM4-80GB", (8, 0)), Backend.EMULATED, "fused Triton kernels"),
        (gpu("NVIDIA H100 PCIe", (9, 0), None), Backend.EMULATED, "Triton is not installed"),
        (gpu("NVIDIA H100 PCIe", (9, 0), "3.5.1"), Backend.EMULATED, "Triton 3.5.1 is older than 3.6"),
        (gpu("Tesla T4", (7, 5)), Backend.REFERENCE, "needs sm_80 or newer, this is Tesla T4 (sm_75)"),
        (B200, Backend.EMULATED, "its FP4 tensor cores have not passed the self-check"),
        (gpu("AMD Instinct MI300X", None, kind="rocm"), Backend.EMULATED, "need an NVIDIA GPU, this is AMD"),
        (gpu("Intel Max 1550", None, kind="xpu"), Backend.EMULATED, "untested on this hardware"),
        (gpu("Apple GPU", None, kind="mps"), Backend.EMULATED, "plain PyTorch quantizer, same bits, slow"),
    ],
    ids=lambda value: value.name if isinstance(value, Device) else None,
)
def test_auto_reports_its_choice_and_the_reason(device, backend, reason):
    chosen, why = choose_backend("auto", device)
    assert chosen is backend
    assert reason in why


def test_auto_selects_native_only_after_its_self_check_passed():
    assert choose_backend("auto", B200)[0] is Backend.EMULATED
    assert choose_backend("auto", B200, native_passed=True)[0] is Backend.NATIVE
    assert choose_backend("auto", H100, native_passed=True)[0] is Backend.EMULATED


@pytest.mark.parametrize(
    ("requested", "device", "message"),
    [
        (
            "native",
            H100,
            "backend native: FP4 tensor cores need NVIDIA sm_100 or newer (Blackwell), this is NVIDIA",
        ),
        ("native", CPU, "this is x86_64 CPU (AVX2). Use auto, which emulates the same bits here."),
        ("native", gpu("NVIDIA B200", (10, 0), None), "Triton is not installed"),
        (
            "emulated",
            gpu("Tesla T4", (7, 5)),
            "needs sm_80 or newer, this is Tesla T4 (sm_75). Use reference.",
        ),
        ("triton", CPU, "backend: must be one of auto, reference, emulated, native, got 'triton'."),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_the_reason(requested, device, message):
    with pytest.raises(ValueError) as error:
        choose_backend(requested, device)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("requested", "device"),
    [("reference", CPU), ("reference", H100), ("emulated", CPU), ("emulated", H100), ("native", B200)],
)
def test_a_backend_that_can_run_is_selected_as_requested(requested, device):
    assert choose_backend(requested, device)[0] is Backend(requested)


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0), (12, 1)])
def test_every_blackwell_has_native_fp4(capability):
    assert unsupported_fp4(gpu("NVIDIA B200", capability)) is None


@pytest.mark.parametrize(
    ("version", "usable"), [("3.6.0", True), ("3.10.1", True), ("4.0", True), ("3.4.0", False)]
)
def test_triton_versions_are_compared_as_numbers(version, usable):
    assert (unsupported_triton(gpu("NVIDIA H100 PCIe", (9, 0), version)) is None) == usable


def test_peak_flops_are_from_a_datasheet_or_unknown():
    assert peak_flops(H100, torch.bfloat16) == 989.4e12
    assert peak_flops(gpu("NVIDIA H100 PCIe", (9, 0)), torch.bfloat16) == 756.5e12
    assert peak_flops(gpu("NVIDIA GeForce RTX 4090", (8, 9)), torch.float8_e4m3fn) == 330.3e12
    assert peak_flops(gpu("NVIDIA A100-SXM4-40GB", (8, 0)), torch.float8_e4m3fn) is None
    assert peak_flops(H100, torch.float32) is None
    assert peak_flops(CPU, torch.bfloat16) is None


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H20", "H200"]
)
def test_a_gpu_with_a_similar_name_has_no_known_peak(name):
    assert peak_flops(gpu(name, (9, 0)), torch.bfloat16) is None


def test_the_probe_describes_the_cpu_of_this_machine():
    device = probe("cpu")
    assert (device.kind, device.torch_device, device.capability) == ("cpu", "cpu", None)
    assert device.torch_version == torch.__version__
    assert device.memory_bytes is None or device.memory_bytes > 1 << 28


@pytest.mark.gpu
def test_the_probe_prefers_the_gpu_of_this_machine():
    device = probe()
    assert device.torch_device == "cuda"
    assert device.memory_bytes == torch.cuda.get_device_properties(0).total_memory


def test_an_absent_device_is_refused():
    with pytest.raises(ValueError, match="device 'tpu': must be present on this machine, which has"):
        probe("tpu")


def test_the_probe_describes_the_gpu_of_the_given_index(monkeypatch):
    """A machine may have an old GPU and a new one."""
    gpus = [SimpleNamespace(name=f"GPU {i}", major=7 + 2 * i, minor=0, total_memory=i) for i in range(2)]
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    found = [probe(torch.device(name)).capability for name in ("cuda", "cuda:0", "cuda:1")]
    assert found == [(7, 0), (7, 0), (9, 0)]


def fake_nvidia_smi(folder, monkeypatch, text="GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)", code=0):
    """A program nvidia-smi, the only one on PATH besides the shell's, that prints a text."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)


def test_a_torch_for_cpus_beside_an_nvidia_gpu_is_found(tmp_path, monkeypatch):
    without_cuda(monkeypatch)
    fake_nvidia_smi(tmp_path, monkeypatch)
    found = idle_nvidia_gpu()
    assert found is not None
    assert "built for CPUs only, beside NVIDIA H100 80GB HBM3." in found
    assert "make install" in found
    assert f"{sys.executable} -m pip install torch" in found


def test_a_cuda_torch_that_finds_no_gpu_is_found_too(tmp_path, monkeypatch):
    without_cuda(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    fake_nvidia_smi(tmp_path, monkeypatch)
    assert "its CUDA 13.0 may need a newer driver" in (idle_nvidia_gpu() or "")


@pytest.mark.parametrize(("text", "code"), [("", 0), ("No devices were found", 6)])
def test_a_driver_without_a_gpu_is_no_finding(tmp_path, monkeypatch, text, code):
    without_cuda(monkeypatch)
    fake_nvidia_smi(tmp_path, monkeypatch, text, code)
    assert idle_nvidia_gpu() is None


def test_without_nvidia_smi_and_with_a_working_gpu_there_is_no_finding(tmp_path, monkeypatch):
    without_cuda(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert idle_nvidia_gpu() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fake_nvidia_smi(tmp_path, monkeypatch)
    assert idle_nvidia_gpu() is None


def test_doctor_shows_the_finding(tmp_path, monkeypatch, capsys):
    without_cuda(monkeypatch)
    fake_nvidia_smi(tmp_path, monkeypatch)
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "unused GPU" in capsys.readouterr().out
