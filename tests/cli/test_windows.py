"""On Windows the library and most commands work; commands that need POSIX say so in one line.

Windows is imitated by what Python lacks there: modules, functions of os and mmap, signals.
"""

import subprocess
import sys

import pytest

from fourbits.cli.commands import COMMANDS
from fourbits.cli.main import main

NEED_POSIX = ("demo", "train", "compare", "protocol")

IMITATION = """
import importlib.abc, mmap, os, signal, sys, warnings

MISSING = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in MISSING:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
for module, names in (
    (os, ("posix_fadvise", "sysconf", "fork")),
    (mmap, ("MADV_WILLNEED",)),
    (signal, ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGKILL")),
):
    for name in names:
        delattr(module, name)
warnings.filterwarnings("ignore", "only soft file lock")  # Windows has a lock of its own
"""

CONVERT = """
import torch, fourbits as fb
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
fb.convert(model, "nvfp4", keep_first=0, keep_last=0)
fb.set_step(model, 0)
model(torch.randn(16, 32)).sum().backward()
print(fb.audit(model).bypassed == ())
"""

COMMANDS_RUN = """
import shutil
from fourbits.cli.commands import COMMANDS, load
from fourbits.cli.main import main
for name in {names}:
    load(name)
shutil.copy(os.__file__, "text.txt")
assert main(["recipes", "list"]) == 0
assert main(["data", "prepare", "text.txt", "--out", "tokens", "--vocab-size", "512"]) == 0
assert main(["data", "inspect", "tokens"]) == 0
print("done")
"""


def imitated(code: str, folder) -> str:
    """What a program prints on the imitation of Windows."""
    command = [sys.executable, "-c", IMITATION + code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_is_converted_and_trained_without_posix(tmp_path):
    assert imitated(CONVERT, tmp_path).endswith("True\n")


def test_commands_that_do_not_train_work_without_posix(tmp_path):
    names = [name for name in COMMANDS if name not in NEED_POSIX]
    assert imitated(COMMANDS_RUN.format(names=names), tmp_path).endswith("done\n")


@pytest.mark.parametrize("name", NEED_POSIX)
def test_a_command_that_needs_posix_says_so_on_windows(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    assert main([name, "--help"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fourbits {name}: needs Linux or macOS: ")
    assert error.count("\n") == 1


def test_only_these_commands_need_posix(tmp_path):
    """The list above is not longer than it has to be: each of them imports what Windows lacks."""
    code = f"""
from fourbits.cli.commands import load
for name in {NEED_POSIX}:
    try:
        load(name)
    except ModuleNotFoundError as error:
        print(error.name)
"""
    assert imitated(code, tmp_path).split() == ["resource"] * len(NEED_POSIX)
