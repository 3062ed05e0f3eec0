"""The command `fourbits`, also as `python -m fourbits` where its script is not on the PATH."""

import signal
import sys

from fourbits.cli.main import main


def command() -> int:
    """Run a command line and return its exit code.

    From then on SIGUSR1 and SIGUSR2 are ignored. They ask a run for a checkpoint or a recording, and would
    otherwise kill a process that is finished and still exits.
    """
    code = main()
    for name in ("SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(command())
