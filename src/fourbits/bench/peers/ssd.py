"""The SSD scan by mamba_ssm's kernels, if installed, and by our PyTorch version, compiled."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from fourbits.model.ops.ssd.op import ssd

Scan = Callable[..., Tensor]
_NAMES = ("y", "dx", "ddt", "da", "db", "dc", "dd")
#: two BF16 scans may differ by the rounding errors of both, each 2^-9 of a term
_ALLOWED = 16 * 2.0**-9


def ssd_peers(chunk_size: int, on_gpu: bool, compiled: bool) -> dict[str, Scan]:
    """Name with version -> scan of (x, dt, a, b, c, d); other packages' kernels come first."""
    peers: dict[str, Scan] = {}
    if on_gpu and find_spec("mamba_ssm") and find_spec("einops"):
        peers[f"mamba_ssm {version('mamba_ssm')}"] = _mamba_ssm()
    if compiled:
        peers["compiled torch"] = _compiled(chunk_size)
    return peers


def refuse_wrong(name: str, peer: Scan, own: Scan, args: tuple[Tensor, ...], dy: Tensor) -> None:
    """Raises RuntimeError if a peer's value or gradients differ from those of `own`."""
    if wrong := _differences(own, peer, args, dy):
        raise RuntimeError(
            f"bench ssd: {name} must agree with our scan, the difference is {wrong}. Uninstall it."
        )


def _compiled(chunk_size: int) -> Scan:
    def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return ssd(x, dt, a, b, c, d, chunk_size).to(x.dtype)

    return torch.compile(scan)


def _mamba_ssm() -> Scan:
    # The package imports its CUDA extension, which these kernels do not need.
    sys.modules.setdefault("selective_scan_cuda", ModuleType("selective_scan_cuda"))
    module = import_module("mamba_ssm.ops.triton.ssd_combined")
    return lambda x, dt, a, b, c, d: module.mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size=256, D=d)


def _differences(own: Scan, peer: Scan, args: tuple[Tensor, ...], dy: Tensor) -> str:
    found: list[list[Tensor]] = []
    for scan in (own, peer):
        leaves = [arg.detach().requires_grad_() for arg in args]
        y = scan(*leaves)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    shares = {
        name: float((theirs.float() - ours.float()).norm() / ours.float().norm())
        for name, ours, theirs in zip(_NAMES, *found, strict=True)
    }
    return ", ".join(f"{name} {share:.2g}" for name, share in shares.items() if not share <= _ALLOWED)
