"""Entry point of the `fourbits` command."""


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    raise SystemExit("fourbits: no command is available yet")
