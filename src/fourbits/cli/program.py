"""Builds command lines that a user can copy: the program as it was started, and an unused folder."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

NAME = "fourbits"


def command_line(words: Sequence[str]) -> str:
    """The words of a command, quoted for a shell, after the program's name or path."""
    return shlex.join([*program(), *words])


def program() -> list[str]:
    """The name if the shell finds this program by it, else how it was started: a path, or python -m."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py" and started.parent.name == NAME:
        return [sys.executable, "-m", NAME]
    if started.name != NAME:  # called from Python
        return [NAME]
    found = shutil.which(NAME)
    return [NAME if found and Path(found).samefile(started) else sys.argv[0]]


def change_folder() -> str:
    """The cd command to the current folder, in which relative paths are valid."""
    return shlex.join(["cd", str(Path.cwd())])


def again(out: Path) -> Path:
    """A folder next to `out` for a repetition."""
    return out.with_name(f"{out.name}-again")
