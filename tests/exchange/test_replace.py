"""A model in a folder survives an export that fails or is killed, at whichever step that happens."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from exchange.exchanged import NO_MAMBA
from fourbits.exchange import folder as folder_module
from fourbits.exchange.folder import load_hf, save_hf
from fourbits.exchange.replace import STAGING, replaced_together
from fourbits.exchange.tensor_files import write_tensors
from fourbits.model.lm import LanguageModel
from model.shapes import small_config

SMALL: dict[str, Any] = {**NO_MAMBA, "pattern": "T", "activation": "swiglu", "d_model": 32, "d_ffn": 32}
# They differ in configuration, number of files, and whether they have a generation_config.json.
MODELS = {
    "one file": (LanguageModel(small_config(**SMALL, rope_theta=1e4), seed=1), 10**9, 3),
    "several files": (LanguageModel(small_config(**SMALL, rope_theta=5e5), seed=2), 24_000, None),
}
DIRECTIONS = [tuple(MODELS), tuple(MODELS)[::-1]]


class Killed(BaseException):
    """Raised at one step, and at every later one: nothing runs after a kill."""


class Fault:
    """Counts the steps that change files; step `at` raises, and has no effect or half of one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: type[BaseException]) -> None:
        self.at, self.error, self.steps = at, error, 0
        for owner, name in (
            (Path, "replace"),
            (Path, "unlink"),
            (Path, "mkdir"),
            (shutil, "rmtree"),
            (os, "fsync"),
        ):
            monkeypatch.setattr(owner, name, self.counted(getattr(owner, name)))
        monkeypatch.setattr(folder_module, "write_tensors", self.write_half)

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.at or (self.error is Killed and self.steps > self.at):
            raise self.error("No space left on device")

    def counted(self, function):
        def call(*args: Any, **kwargs: Any) -> Any:
            self.step()
            return function(*args, **kwargs)

        return call

    def write_half(self, path, described, parts) -> None:
        write_tensors(path, described, parts)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        self.step()
        path.write_bytes(whole)


def export(name: str, folder: Path) -> None:
    model, shard_bytes, end_token = MODELS[name]
    state = model.state_dict()
    save_hf(state, model.config, folder, dtype=torch.float32, shard_bytes=shard_bytes, end_token=end_token)


def found(folder: Path) -> str:
    """Which of the models is in the folder, exactly and with all of its files."""
    loaded = load_hf(folder)
    for name, (model, _, end_token) in MODELS.items():
        if loaded.config == model.config:
            for key, value in model.state_dict().items():
                assert torch.equal(loaded.state_dict()[key], value)
            assert (folder / "generation_config.json").exists() == (end_token is not None)
            return name
    raise AssertionError("the folder has a model that was never exported")


def failing(at: int, error: type[BaseException], name: str, folder: Path) -> bool:
    """Export with a fault at step `at`; whether there was such a step."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        fault = Fault(monkeypatch, at, error)
        try:
            export(name, folder)
        except error:
            return True
        assert fault.steps < at, "an error was swallowed"
        return False


def refused(folder: Path) -> None:
    """An export that ends in an error while it writes, which brings back what an earlier one had moved."""
    model = MODELS["one file"][0]
    state = {**model.state_dict(), "norm.weight": torch.full((32,), torch.nan)}
    with pytest.raises(ValueError, match=r"'norm.weight' has 32 values that are not finite"):
        save_hf(state, model.config, folder)


@pytest.mark.parametrize(("old", "new"), DIRECTIONS)
def test_after_an_error_at_any_step_the_folder_has_one_of_the_models_whole(old, new, tmp_path):
    results: list[str] = []
    for at in range(1, 200):
        folder = tmp_path / str(at)
        export(old, folder)
        (folder / "notes.txt").write_text("mine")
        before = {file.name for file in folder.iterdir()}
        fired = failing(at, OSError, new, folder)
        results.append(found(folder))
        assert (folder / "notes.txt").read_text() == "mine"
        if results[-1] == old:
            assert {file.name for file in folder.iterdir()} - {STAGING} == before
        if not fired:
            break
    switched = results.index(new)
    assert switched > 12, "fewer steps than there are files"
    assert results == [old] * switched + [new] * (len(results) - switched)
    assert len(results) < 199, "the last one ran without a fault"


@pytest.mark.parametrize(("old", "new"), DIRECTIONS)
def test_after_a_kill_at_any_step_no_model_is_lost_or_mixed(old, new, tmp_path):
    hidden, fired = 0, True
    for at in range(1, 200):
        folder = tmp_path / str(at)
        export(old, folder)
        fired = failing(at, Killed, new, folder)
        try:
            found(folder)
        except ValueError as error:
            assert "an export into it was interrupted. Rerun it" in str(error)  # noqa: PT017
            hidden += 1
        refused(folder)
        assert found(folder) in (old, new)
        export(new, folder)
        assert found(folder) == new
        assert not (folder / STAGING).exists()
        if not fired:
            break
    assert 0 < hidden < 20, "the renames, and nothing that takes time"
    assert not fired


def test_a_kill_while_a_killed_export_is_undone_changes_nothing(tmp_path):
    """Killed among its moves, and then at every step of the undoing by the next export."""
    export("one file", tmp_path / "model")
    moves = 0
    for at in range(1, 100):
        shutil.rmtree(tmp_path / "model")
        export("one file", tmp_path / "model")
        failing(at, Killed, "several files", tmp_path / "model")
        if (tmp_path / "model" / "config.json").exists():
            continue
        moves += 1
        shutil.copytree(tmp_path / "model", tmp_path / f"killed{at}")
        for again in range(1, 12):
            folder = tmp_path / f"{at}-{again}"
            shutil.copytree(tmp_path / f"killed{at}", folder)
            failing(again, Killed, "several files", folder)
            refused(folder)
            assert found(folder) == "one file"
    assert moves >= 3


def test_two_exports_into_one_folder_do_not_run_at_once(tmp_path):
    export("one file", tmp_path)
    with (
        FileLock(tmp_path / f"{STAGING}.lock"),
        pytest.raises(ValueError, match="another process is exporting into it"),
    ):
        export("several files", tmp_path)
    assert found(tmp_path) == "one file"


def test_only_the_files_of_the_set_are_replaced(tmp_path):
    for name in ("last", "a", "b", "c"):
        (tmp_path / name).write_text("old")
    with replaced_together(tmp_path, "last", ["b*"]) as new:
        for name in ("last", "a", "d"):
            (new / name).write_text("new")
        assert (tmp_path / "last").read_text() == "old"
    texts = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert texts == {"last": "new", "a": "new", "c": "old", "d": "new"}
