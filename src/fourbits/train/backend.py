"""The backend of a run, from the request, the device and the self-check."""

import torch

from fourbits.device import Backend, Device, choose_backend, unsupported_fp4
from fourbits.gemm.native.self_check import unsupported_arithmetic
from fourbits.linear.convert import require_native


def resolve_backend(requested: str, device: Device) -> tuple[Backend, str]:
    """The backend of a run, and the reason in one sentence. requested: auto, emulated or native.

    The self-check runs if the device has FP4 tensor cores. Raises ValueError if native was requested and they
    are absent or fail the check; auto then emulates, and the reason says so.
    """
    if requested == "emulated" or unsupported_fp4(device) is not None:
        return choose_backend(requested, device)
    if requested == "native":
        require_native(device)
    wrong = unsupported_arithmetic(torch.device(device.torch_device))
    backend, reason = choose_backend(requested, device, native_passed=wrong is None)
    return backend, reason if wrong is None else f"{reason}: {wrong}"
