"""How a tensor becomes a short text that is equal exactly where its bits are; files of such texts."""

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

#: floating dtypes in which the sign and the payload of a NaN are nobody's promise; FP8 and E8M0 are codes
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def hashed(x: Tensor | None) -> str:
    """16 hex digits over dtype, shape and bytes, every NaN being the same; a dash for None."""
    if x is None:
        return "-"
    x = x.detach().contiguous().cpu()
    if x.dtype in _FLOATS:
        x = torch.where(torch.isnan(x), torch.full((), torch.nan, dtype=x.dtype), x)
    digest = hashlib.sha256(f"{x.dtype} {list(x.shape)} ".encode())
    digest.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def described(x: Tensor | None) -> str:
    """The hash behind dtype and shape in words."""
    if x is None:
        return "-"
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} {hashed(x)}".replace(", ", "x")


def read(path: Path) -> dict[str, str]:
    """Entries of a file that `write` made."""
    return json.loads(path.read_text(encoding="ascii"))


def write(path: Path, entries: dict[str, str]) -> None:
    """One entry a line, sorted by key."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(entries.items()))
    path.write_text(f"{{\n{lines}\n}}\n", encoding="ascii")


def differences(a: dict[str, str], b: dict[str, str]) -> list[str]:
    """Keys whose values differ, or that only one side has, sorted."""
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
