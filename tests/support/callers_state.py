"""What a caller may have set when it calls us: a default dtype, a default device, autocast."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    **{
        f"default {dtype}": partial(default_dtype, dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.float16)
    },
    "default device meta": partial(torch.device, "meta"),
    **{
        f"autocast {dtype}": partial(torch.autocast, "cpu", dtype)
        for dtype in (torch.bfloat16, torch.float16)
    },
}
