"""Debian packages through apt-get, without root: its lists and caches live in a folder we own.

apt-get verifies signatures and hashes, and uses the mirror that the machine is configured for.
"""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

REMEDY = "Download the packages on a system that has it, and pass their folder with --debs."


class Apt:
    """apt-get with a separate state folder."""

    def __init__(self, folder: Path) -> None:
        """Create the folder. Raises ValueError if apt-get is not installed."""
        if not shutil.which("apt-get"):
            raise ValueError(f"the Debian corpus needs apt-get, which comes with Debian and Ubuntu. {REMEDY}")
        self.folder = folder.resolve()
        for name in ("lists/partial", "cache/archives/partial"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def update(self) -> None:
        """Download the package lists."""
        self._run("apt-get", "-q", "update", cwd=self.folder)

    def names(self) -> list[str]:
        """Names of all available packages."""
        return self._run("apt-cache", "pkgnames", cwd=self.folder).split()

    def download(self, name: str, into: Path) -> Path:
        """Download one package into a folder unless it is already there. Returns its file."""
        if not (found := sorted(into.glob(f"{name}_*.deb"))):
            self._run("apt-get", "-q", "download", name, cwd=into)
            found = sorted(into.glob(f"{name}_*.deb"))
        return found[-1]

    def _run(self, command: str, *arguments: str, cwd: Path) -> str:
        options = (
            f"Dir::State::Lists={self.folder / 'lists'}",
            f"Dir::Cache={self.folder / 'cache'}",
            "Acquire::Languages=none",
        )
        argv = [command, *(part for option in options for part in ("-o", option)), *arguments]
        done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            raise ValueError(f"{command} {' '.join(arguments)}: failed: {last}")
        return done.stdout


def newest(pattern: str, names: Sequence[str]) -> str | None:
    """The name with the highest version among those that fully match the regular expression, or None."""
    found = [name for name in names if re.fullmatch(pattern, name)]
    return max(found, key=_version, default=None)


def _version(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
