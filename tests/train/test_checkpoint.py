"""Checkpoints: complete or invisible, never unpickled, and errors that name the file."""

import errno
import hashlib
import json
import pickle
import resource

import pytest
import torch

from fourbits.train.checkpoint import (
    checkpoints,
    load_tensors,
    open_checkpoint,
    remove_old,
    save_checkpoint,
)
from fourbits.train.non_finite import NonFiniteError


def tensors(scale=1.0):
    return {"a.weight": scale * torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2], dtype=torch.int64)}


def save(folder, step, scale=1.0):
    return save_checkpoint(folder, step, {"model": tensors(scale)}, {"next_sample": 8 * step})


def test_what_was_saved_comes_back_with_the_same_bits(tmp_path):
    path = save(tmp_path, 3, scale=1 / 3)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.step, checkpoint.state) == (3, {"next_sample": 24})
    found = load_tensors(checkpoint, "model", tensors())
    assert all(torch.equal(found[name], value) for name, value in tensors(1 / 3).items())
    assert found["b"].dtype == torch.int64


def test_checkpoints_are_sorted_by_number_not_by_text(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_9", "step_10", "step_100"]


def test_only_the_newest_are_kept_and_unfinished_ones_removed(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / ".unfinished-step_4").mkdir()
    remove_old(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_3"]


def test_an_unfinished_checkpoint_is_invisible(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".unfinished-step_2").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step_1"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-4])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change(path, **entries):
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize(
    ("file", "damage", "text"),
    [
        ("model.safetensors", cut, "model.safetensors: truncated or replaced"),
        ("model.safetensors", flip, "model.safetensors: content does not match the hash in state.json"),
        ("model.safetensors", lambda path: path.unlink(), "model.safetensors: missing"),
        ("state.json", cut, "state.json: damaged"),
        ("state.json", lambda path: path.unlink(), "not a fourbits checkpoint (no state.json)"),
        ("state.json", lambda path: path.write_text('{"format": "x"}'), "not a fourbits checkpoint"),
        ("state.json", lambda path: path.write_text("[]"), "not a fourbits checkpoint"),
        ("state.json", lambda path: change(path, files=None), "damaged: it must hold 'files' and 'state'"),
        ("state.json", lambda path: change(path, files={"a": {}}), "files.a must hold 'bytes' and 'sha256'"),
    ],
)
def test_a_damaged_or_foreign_checkpoint_is_a_one_line_error(tmp_path, file, damage, text):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    damage(path / file)
    with pytest.raises(ValueError) as error:
        open_checkpoint(path)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_the_error_of_a_damaged_checkpoint_names_the_one_before(tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    cut(path / "model.safetensors")
    with pytest.raises(ValueError, match=r"Remove step_2 to continue from step_1\."):
        open_checkpoint(path)


class Trap:
    """Unpickling it would raise."""

    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_a_pickle_with_the_name_of_a_checkpoint_file_is_refused_unopened(tmp_path):
    path = save(tmp_path, 1)
    file = path / "model.safetensors"
    file.write_bytes(pickle.dumps(Trap()))
    head = json.loads((path / "state.json").read_text())
    content = file.read_bytes()
    head["files"][file.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "state.json").write_text(json.dumps(head))
    with pytest.raises(ValueError, match=r"model\.safetensors: not a readable safetensors file"):
        load_tensors(open_checkpoint(path), "model", tensors())


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ({"a.weight": torch.zeros(3, 2)}, r"'a.weight' is float32 \[2, 3\], this run has float32 \[3, 2\]"),
        ({"a.weight": torch.zeros(2, 3, dtype=torch.bfloat16)}, r"this run has bfloat16 \[2, 3\]"),
        ({"c": torch.zeros(1)}, "'c' exists in the model only"),
        ({"b": None}, "'b' exists in the checkpoint only"),
    ],
)
def test_a_checkpoint_of_another_model_names_the_tensor(tmp_path, expected, text):
    checkpoint = open_checkpoint(save(tmp_path, 1))
    of_model = {name: t for name, t in {**tensors(), **expected}.items() if t is not None}
    with pytest.raises(ValueError, match=text):
        load_tensors(checkpoint, "model", of_model)


@pytest.mark.parametrize("limit", [64, 400])
def test_a_full_disk_leaves_earlier_checkpoints_and_no_partial_one(tmp_path, limit):
    """The size limit of a process stands for the disk; 64 bytes stop the tensors, 400 those or state.json."""
    earlier = save(tmp_path, 1)
    before = {path.name: path.read_bytes() for path in earlier.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match="step 2 was not saved, earlier checkpoints are intact") as error:
            save_checkpoint(tmp_path, 2, {"model": tensors()}, {"long": "x" * 400})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.errno == errno.EFBIG
    assert error.value.filename == str(tmp_path / "step_2")
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert {path.name: path.read_bytes() for path in earlier.iterdir()} == before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_state_is_never_written(tmp_path, value):
    poisoned = {"model": {"a": torch.ones(3), "b": torch.tensor([1.0, value])}}
    with pytest.raises(NonFiniteError, match="step 5: 'b' of model is not finite"):
        save_checkpoint(tmp_path, 5, poisoned, {})
    assert list(tmp_path.iterdir()) == []


def test_files_follow_the_permissions_of_their_folder(tmp_path):
    path = save(tmp_path, 1)
    assert (path / "model.safetensors").stat().st_mode & 0o777 == path.stat().st_mode & 0o666
