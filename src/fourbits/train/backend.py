"""Which backend a run trains on: what was asked for, what the device has, what its self-check says."""

import torch

from fourbits.device import Backend, Device, choose_backend, native_unsupported
from fourbits.gemm.native.self_check import why_not_trusted
from fourbits.linear.convert import require_native


def settled_backend(requested: str, device: Device) -> tuple[Backend, str]:
    """The backend of a run and why, in one sentence. requested: auto, emulated or native.

    The self-check of FP4 tensor cores runs where they could be used. Raises ValueError if native was
    requested and they are absent or fail it; auto then emulates, and the sentence says so.
    """
    if requested == "emulated" or native_unsupported(device) is not None:
        return choose_backend(requested, device)
    if requested == "native":
        require_native(device)
    wrong = why_not_trusted(torch.device(device.torch_device))
    backend, reason = choose_backend(requested, device, native_passed=wrong is None)
    return backend, reason if wrong is None else f"{reason}: {wrong}"
