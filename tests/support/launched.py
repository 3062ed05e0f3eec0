"""torchrun with two ranks in the background, watched by its files and processes."""

import subprocess
import time
from pathlib import Path

from support.torchrun import PATIENCE, command_of, environment


class Launched:
    """torchrun in the background, with its output in files."""

    def __init__(self, folder, *words, options=()):
        self.out, self.errors = folder / "run", folder / "errors.txt"
        self.words = ["train", *words, "--out", str(self.out)]
        with self.errors.open("a") as errors:
            self.process = subprocess.Popen(
                command_of(2, self.words, *options),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment(),
            )

    def running(self, number):
        """The process of a rank that runs."""
        found = self.rank(number)
        assert found is not None
        return found

    def rank(self, number):
        """The process of a rank, or None while it is not there."""
        pid = self.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except FileNotFoundError:
            return None
        return int(children[number]) if len(children) == 2 else None

    def wait_for(self, holds):
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.005)

    def reached(self, step):
        metrics = self.out / "metrics.jsonl"
        return metrics.exists() and f'"step": {step},' in metrics.read_text()

    def lines(self):
        """The number of lines of its metrics."""
        metrics = self.out / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def wait_until(self, deadline, more):
        """Wait for a time, or until the ranks that run now have added so many lines to the metrics."""
        fewest = self.lines()  # a resumed run removes those after its checkpoint
        while time.monotonic() < deadline and self.lines() - fewest < more:
            fewest = min(fewest, self.lines())
            time.sleep(0.01)

    def end(self, patience=PATIENCE):
        """(torchrun's exit code, what it and the ranks printed on stderr). patience: seconds."""
        return self.process.wait(patience), self.errors.read_text()
