"""Commands that are printed to be copied start the program as it was started."""

import sys
from pathlib import Path

import pytest

from fourbits.cli.program import again, change_folder, command_line


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """An executable file bin/fourbits."""
    program = tmp_path / "bin/fourbits"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


def test_a_program_on_the_path_is_named(installed: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", [str(installed), "demo"])
    monkeypatch.setenv("PATH", str(installed.parent))
    assert command_line(["train", "my run"]) == "fourbits train 'my run'"


def test_a_program_that_the_shell_does_not_find_has_its_path(
    installed: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", [str(installed), "demo"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert command_line(["demo"]) == f"{installed} demo"


def test_another_program_of_the_name_on_the_path_is_not_taken_for_it(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = tmp_path / "other/fourbits"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(installed), "demo"])
    monkeypatch.setenv("PATH", str(other.parent))
    assert command_line(["demo"]) == f"{installed} demo"


def test_a_module_started_by_python_is_started_so_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["/lib/fourbits/__main__.py", "demo"])
    assert command_line(["demo"]) == f"{sys.executable} -m fourbits demo"


def test_commands_run_where_this_one_did_and_write_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert change_folder() == f"cd {tmp_path}"
    assert again(Path("runs/demo")) == Path("runs/demo-again")
