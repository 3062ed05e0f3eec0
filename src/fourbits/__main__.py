"""The command `fourbits`, also as `python -m fourbits` where its script is not on the PATH."""

import sys

from fourbits.cli.main import main
from fourbits.cli.signals import ignore_requests


def command() -> int:
    """Run a command line and return its exit code, with which the process exits."""
    code = main()
    ignore_requests()
    return code


if __name__ == "__main__":
    sys.exit(command())
