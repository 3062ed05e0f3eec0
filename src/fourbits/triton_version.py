"""The installed version of Triton, and whether our kernels can be imported with it."""

import functools
import importlib.metadata
import re
from importlib.util import find_spec

MIN_TRITON = (3, 6)


@functools.cache
def installed_triton() -> str | None:
    """The version of Triton, whichever package provides it; None if it is not installed."""
    if find_spec("triton") is None:
        return None
    for package in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def unsupported_version(version: str | None) -> str | None:
    """Why kernels cannot be built with this version of Triton, or None."""
    needed = ".".join(map(str, MIN_TRITON))
    if version is None:
        return f"Triton is not installed (pip install 'triton>={needed}')"
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < MIN_TRITON:
        return f"Triton {version} is older than {needed} (pip install 'triton>={needed}')"
    return None


#: whether modules of kernels are imported: an older Triton lacks names they use
HAS_TRITON = unsupported_version(installed_triton()) is None
