"""Checkpoints: a folder step_N of safetensors files and one JSON file, complete or invisible.

A checkpoint is written into a folder with a temporary name, flushed to disk, and renamed. state.json lists
every file with size and hash. Nothing is unpickled, so a foreign checkpoint cannot run code: at worst its
numbers are wrong. Random bits are not stored: they follow from seed, step and token, and a resumed run gives
`set_step` the step of its checkpoint (trainer.py).
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Container, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fourbits.data.whole_file import library_error, sync_path, system_remedy, write_json
from fourbits.exchange.tensor_files import TensorFile
from fourbits.exchange.tensor_pieces import TensorPieces
from fourbits.train.non_finite import NonFiniteError

FORMAT = "fourbits-checkpoint"
#: versions of checkpoints with a file per part, and with a folder of shards per part
VERSION, SHARDED = 1, 2
STATE = "state.json"
_UNFINISHED = ".unfinished-"
_NAME = re.compile(r"step_(\d+)")

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. state: JSON values saved with the tensors; files: name -> size and SHA-256."""

    path: Path
    step: int
    state: dict[str, Any]
    files: dict[str, dict[str, Any]]


def save_checkpoint(folder: Path, step: int, files: Mapping[str, Tensors], state: Mapping[str, Any]) -> Path:
    """Write folder/step_N with one safetensors file for each entry of `files`, and return its path.

    state: plain JSON values. Raises NonFiniteError for a tensor with a non-finite value, and OSError e.g. for
    a full disk. In both cases no partial checkpoint remains, and existing ones are unchanged.
    """
    if (found := first_non_finite(files)) is not None:
        raise refused(step, *found)
    target = folder / f"step_{step}"
    if is_complete(target):
        return target
    with appearing(target) as unfinished:
        records = {
            f"{name}.safetensors": _write_tensors(unfinished / f"{name}.safetensors", tensors)
            for name, tensors in files.items()
        }
        write_state_file(unfinished, step, state, records)
    return target


def refused(step: int, name: str, key: str) -> NonFiniteError:
    """The error for a checkpoint with a tensor that is not finite."""
    return NonFiniteError(f"step {step}: {key!r} of {name} is not finite. No checkpoint of it was written.")


def is_complete(target: Path) -> bool:
    """Whether a checkpoint is there already."""
    return (target / STATE).is_file()


@contextmanager
def appearing(target: Path) -> Generator[Path]:
    """A folder to write a checkpoint in, which gets its name at the end; after an error nothing remains.

    Raises OSError naming the checkpoint, e.g. for a full disk.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.parent / f"{_UNFINISHED}{target.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        yield unfinished
        sync_path(unfinished)
        unfinished.rename(target)
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            raise not_saved(error, target) from error
        raise
    sync_path(target.parent)


def not_saved(error: OSError, target: Path) -> OSError:
    """The message about a checkpoint that could not be written."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    text = f"{reason}; step {step_of(target)} was not saved, earlier checkpoints are intact"
    return OSError(error.errno, f"{text}{system_remedy(error.errno)}", str(target))


def write_state_file(
    unfinished: Path, step: int, state: Mapping[str, Any], records: Mapping[str, Any]
) -> None:
    """Write state.json. records: by file, as `record_of` returns them."""
    version = SHARDED if any("/" in name for name in records) else VERSION
    head = {"format": FORMAT, "version": version, "step": step, "state": dict(state), "files": dict(records)}
    write_json(unfinished / STATE, head)


def amend(path: Path, changes: Mapping[str, Any]) -> None:
    """Change JSON values of a checkpoint's state, atomically. OSError for a full disk."""
    head = json.loads((path / STATE).read_text(encoding="utf-8"))
    write_json(path / STATE, head | {"state": head["state"] | dict(changes)})


def remove_after(folder: Path, step: int) -> None:
    """Remove the checkpoints of later steps, newest first, so that the others belong to one history."""
    for path in reversed(checkpoints(folder)):
        if step_of(path) > step:
            _remove(path)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(
            f"{path}: not a checkpoint (its name must be step_N). Pass a folder inside checkpoints/."
        )
    return int(match[1])


def remove_old(
    folder: Path, keep: int, keep_every: int | None = None, needed: Container[int] = frozenset()
) -> None:
    """Remove all but the newest `keep` checkpoints, and unfinished ones that killed runs left behind.

    keep_every: checkpoints whose step is a multiple of it are kept, too, and those of the steps in `needed`.
    """
    for path in checkpoints(folder)[:-keep]:
        step = step_of(path)
        if step not in needed and (keep_every is None or step % keep_every):
            _remove(path)
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path)


def _remove(path: Path) -> None:
    """Rename a checkpoint before it is removed: a half-removed one must not look like a damaged one."""
    unfinished = path.with_name(f"{_UNFINISHED}{path.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    path.rename(unfinished)
    shutil.rmtree(unfinished)


def open_checkpoint(path: Path, rank: int = 0, world: int = 1) -> Checkpoint:
    """Read state.json and verify all files. Raises ValueError for a foreign or damaged checkpoint.

    rank, world: of processes that share the work, each of which hashes every world-th file.
    """
    state_file = path / STATE
    if not state_file.is_file():
        raise ValueError(f"{path}: not a fourbits checkpoint (no {STATE}). {_remedy(path)}")
    try:
        head = json.loads(state_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{state_file}: damaged: {error}. {_remedy(path)}") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError(
            f"{state_file}: not a fourbits checkpoint (its format must be {FORMAT!r}). {_remedy(path)}"
        )
    if head.get("version") not in (VERSION, SHARDED):
        raise ValueError(
            f"{state_file}: version must be {VERSION} or {SHARDED}, got {head.get('version')}. "
            "Use the version of fourbits that wrote it."
        )
    if head.get("step") != step_of(path):
        raise ValueError(
            f"{path}: the name must match the step it records, {head.get('step')}; it was renamed or copied. "
            f"Rename it back to step_{head.get('step')}."
        )
    if (problem := _malformed(head)) is not None:
        raise ValueError(f"{state_file}: damaged: {problem}. {_remedy(path)}")
    for number, (name, record) in enumerate(head["files"].items()):
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file}: missing. {_remedy(path)}")
        size = file.stat().st_size
        if size != record["bytes"]:
            raise ValueError(
                f"{file}: truncated or replaced: {size} bytes, {STATE} records {record['bytes']}. "
                f"{_remedy(path)}"
            )
        if number % world == rank and _sha256(file) != record["sha256"]:
            raise ValueError(f"{file}: content does not match the hash in {STATE}. {_remedy(path)}")
    return Checkpoint(path, head["step"], head["state"], head["files"])


def _malformed(head: dict[str, Any]) -> str | None:
    """The first malformed part of the rest of a state.json, or None."""
    files = head.get("files")
    if not isinstance(files, dict) or not isinstance(head.get("state"), dict):
        return "it must hold 'files' and 'state'"
    for name, record in files.items():
        fields = record if isinstance(record, dict) else {}
        if not isinstance(fields.get("bytes"), int) or not isinstance(fields.get("sha256"), str):
            return f"files.{name} must hold 'bytes' and 'sha256'"
    return None


def load_tensors(checkpoint: Checkpoint, name: str, expected: Tensors) -> dict[str, Tensor]:
    """The tensors of one part, on the CPU, with the names, shapes and dtypes of `expected`.

    Raises ValueError naming the file and the first tensor that differs.
    """
    return dict(open_tensors(checkpoint, name, expected))


def open_tensors(checkpoint: Checkpoint, name: str, expected: Tensors) -> TensorFile | TensorPieces:
    """As `load_tensors`, with each tensor read on access."""
    file = checkpoint.path / f"{name}.safetensors"
    shards = [checkpoint.path / each for each in checkpoint.files if each.startswith(f"{name}/")]
    if file.name not in checkpoint.files and not shards:
        raise ValueError(f"{file}: not part of this checkpoint. Continue the run with its own recipe.")
    try:
        stored = TensorPieces(shards) if shards else TensorFile(file)
    except ValueError as error:
        reason = str(error).removesuffix(".")
        raise ValueError(f"{reason}. {_remedy(checkpoint.path)}") from error
    found = stored.described
    for key in [*expected, *found]:
        if key not in found or key not in expected:
            where = "checkpoint" if key in found else "model"
            raise ValueError(
                f"{file}: belongs to another model: {key!r} exists in the {where} only. "
                "Continue the run with its own config.yaml."
            )
        if found[key].shape != expected[key].shape or found[key].dtype != expected[key].dtype:
            raise ValueError(
                f"{file}: belongs to another model: {key!r} is {_kind(found[key])}, this run has "
                f"{_kind(expected[key])}. Continue the run with its own config.yaml."
            )
    return stored


def first_non_finite(files: Mapping[str, Tensors]) -> tuple[str, str] | None:
    """(part, name) of the first tensor that is not finite, or None."""
    for name, tensors in files.items():
        for key, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                return name, key
    return None


def _write_tensors(path: Path, tensors: Tensors) -> dict[str, Any]:
    try:
        save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise library_error(error, path) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes it private, ignoring the umask
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return record_of(path)


def record_of(path: Path) -> dict[str, Any]:
    """Size and hash of a file, for state.json."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _remedy(path: Path) -> str:
    others = [p for p in checkpoints(path.parent) if p != path]
    return (
        f"Remove {path.name} to continue from {others[-1].name}."
        if others
        else f"Remove {path.name} to start from the beginning."
    )
