"""Entry point of `fourbits`: selects a command, runs it, and turns errors into exit codes.

0: done; 1: failed; 2: incorrect usage; 124: train.time_limit; 128 + N: stopped by signal N, 130 for Ctrl-C.
An error is one or two lines on stderr.
"""

import os
import sys
import traceback
import warnings

from fourbits.cli.commands import COMMANDS, load
from fourbits.cli.errors import describe
from fourbits.cli.parser import main_parser, parse
from fourbits.cli.signals import ended_by_signals, stopped
from fourbits.settings import nearest
from fourbits.train.ranks.failure import LostRankError, RankFailedError
from fourbits.train.ranks.launcher import launched_rank
from fourbits.version import VERSION

USAGE_ERRORS = (
    ValueError,
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FileExistsError,
)


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    parser = main_parser()
    args = parser.parse_args(argv)
    if args.version:
        print(f"fourbits {VERSION}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    if args.command not in COMMANDS:
        parser.error(f"unknown command {args.command!r}.{nearest(args.command, list(COMMANDS))}")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        with ended_by_signals(args.command):
            return _run(args.command, args.rest)


def _run(name: str, argv: list[str]) -> int:
    debug = "--debug" in argv
    try:
        _require_alone(name)
        command = load(name)
        code = command.run(parse(name, command, [word for word in argv if word != "--debug"]))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as error:
        text, code = stopped(error)
        if not _is_follower():
            print(f"fourbits {name}: {text}", file=sys.stderr)
        return code
    except BrokenPipeError:  # the reader of a pipe, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RankFailedError as failure:
        code = 2 if isinstance(failure.__cause__, USAGE_ERRORS) else 1
        error = failure.__cause__
        assert isinstance(error, Exception)
        if failure.reports:
            _report(name, error, debug, code, failure.subject)
            for line in failure.others:
                print(f"fourbits {name}: {line}", file=sys.stderr)
        return code
    except USAGE_ERRORS as error:
        return _report(name, error, debug, 2)
    except Exception as error:  # noqa: BLE001 - no error may reach the user as a traceback
        return _report(name, error, debug, 1)


def _is_follower() -> bool:
    """Whether torchrun started this process as a rank other than 0."""
    where = launched_rank()
    return where is not None and where.rank > 0


def _require_alone(name: str) -> None:
    """Raises ValueError for a single-process command that torchrun started in several processes."""
    where = launched_rank()
    # bench itself refuses benchmarks that run in one process
    if where is not None and where.world > 1 and name not in ("train", "eval", "bench"):
        raise ValueError(
            f"runs in one process, but torchrun started {where.world}. Use torchrun for fourbits train, "
            "fourbits eval, fourbits bench ranks and fourbits bench calibrate only."
        )


def _report(name: str, error: Exception, debug: bool, code: int, rank: str = "") -> int:
    """Print an error. rank: the rank that reports it, if there are several."""
    if _is_follower() and not rank:  # every rank found it before they connected
        return code
    if debug:
        traceback.print_exception(error)
        return code
    text = describe(error)
    subject, _, rest = text.partition(": ")
    if rest and subject in (name, name.removesuffix("s")):  # no "fourbits data: data: ..."
        text = rest
    text = text.removeprefix(f"{name} ")  # no "fourbits bench: bench model: ..."
    if code == 1 and not isinstance(error, OSError | LostRankError):
        text += " (rerun with --debug for the traceback)"
    print(f"fourbits {name}: {rank}{text}", file=sys.stderr)
    return code


def _show_warning(message: Warning | str, *_: object) -> None:
    if not _is_follower():  # which log theirs
        print(f"fourbits: warning: {message}", file=sys.stderr)
