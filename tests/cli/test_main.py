"""The command line: exit codes, short errors, settings as options."""

import errno
import json
import shlex
import signal
import subprocess
import sys
import types
import warnings
from typing import cast

import pytest
import torch

from fourbits.cli import main as main_module
from fourbits.cli.commands import COMMANDS, Command, load
from fourbits.cli.main import main
from fourbits.cli.parser import command_parser, parse


def one_option(parser):
    parser.add_argument("config", nargs="?")
    parser.add_argument("--out")


def fake(run, overrides=True, add_arguments=one_option):
    """A fake command module."""
    body = {"EXAMPLE": "fourbits fake x", "OVERRIDES": overrides, "add_arguments": add_arguments, "run": run}
    return cast(Command, types.SimpleNamespace(__doc__="A fake.", **body))


@pytest.fixture
def fourbits(monkeypatch, capsys):
    """Run `fourbits fake ...` with a given command, or body of one; (exit code, stdout, stderr)."""

    def run(command, *argv):
        monkeypatch.setitem(COMMANDS, "fake", "a fake")
        monkeypatch.setattr(main_module, "load", lambda name: fake(command) if callable(command) else command)
        try:
            code = main(["fake", *argv])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


def failing(error):
    def body(args):
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("lr must be positive, got -1."), 2, "fourbits fake: lr must be positive, got -1.\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a.yaml"),
            2,
            "a.yaml: No such file or directory. Correct the path, or create what it names.\n",
        ),
        (
            PermissionError(13, "Permission denied", "/x"),
            2,
            "fourbits fake: /x: Permission denied. Change its permissions, or pass another path.\n",
        ),
        (OSError(errno.EIO, "Input/output error", "/x"), 1, "fourbits fake: /x: Input/output error.\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "w.bin"),
            1,
            "w.bin: No space left on device. Free some space and rerun the command.\n",
        ),
        (
            RuntimeError("loss is NaN"),
            1,
            "fourbits fake: RuntimeError: loss is NaN (rerun with --debug for the traceback)\n",
        ),
        (KeyError("layer"), 1, "fourbits fake: KeyError: 'layer' (rerun with --debug for the traceback)\n"),
        (KeyboardInterrupt(), 130, "fourbits fake: stopped by Ctrl-C.\n"),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(fourbits, error, code, text):
    got, out, err = fourbits(failing(error))
    assert (got, out) == (code, "")
    assert err.endswith(text)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "message", "shown"),
    [
        ("fake", "fake: no text. Name a file.", "fourbits fake: no text. Name a file.\n"),
        ("fakes", "fake: no text. Name a file.", "fourbits fakes: no text. Name a file.\n"),
        ("fake", "faker: no text. Name a file.", "fourbits fake: faker: no text. Name a file.\n"),
        ("fake", "fake it: no text. Name a file.", "fourbits fake: it: no text. Name a file.\n"),
        ("fake", "fake: ", "fourbits fake: fake: \n"),
    ],
)
def test_an_error_does_not_repeat_the_name_of_the_command(name, message, shown, monkeypatch, capsys):
    monkeypatch.setitem(COMMANDS, name, "a fake")
    monkeypatch.setattr(main_module, "load", lambda name: fake(failing(ValueError(message))))
    assert main([name]) == 2
    assert capsys.readouterr().err == shown


def test_a_long_error_is_shortened_to_two_lines(fourbits):
    _, _, err = fourbits(failing(ValueError("one\n\ntwo\nthree")))
    assert err == "fourbits fake: one\ntwo\n"


def test_debug_shows_the_traceback(fourbits):
    code, _, err = fourbits(failing(ValueError("bad")), "--debug")
    assert code == 2
    assert "Traceback" in err
    assert "in body" in err


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line_without_a_source_position(fourbits):
    def body(args):
        warnings.warn("no C++ compiler: slower", stacklevel=1)
        return 0

    assert fourbits(body) == (0, "", "fourbits: warning: no C++ compiler: slower\n")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["tiny", "--optim.lr", "3e-4"], ("tiny", None, {"optim.lr": "3e-4"})),
        (["--optim.lr", "3e-4", "tiny", "--out", "d"], ("tiny", "d", {"optim.lr": "3e-4"})),
        (["--optim.lr=-1", "--recipe", "nvfp4"], (None, None, {"optim.lr": "-1", "recipe": "nvfp4"})),
        (["--optim.lr", "-1", "--out=d"], (None, "d", {"optim.lr": "-1"})),
    ],
)
def test_unknown_options_are_settings_in_any_position(argv, expected):
    args = parse("fake", fake(None), argv)
    assert (args.config, args.out, args.overrides) == expected


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--optim.lr"], "the setting --optim.lr needs a value, as in --optim.lr VALUE"),
        (["--optim.lr", "--out", "d"], "the setting --optim.lr needs a value"),
        (
            ["--data.paths", ""],
            "--data.paths is empty, as from a variable that is not set; to unset it, pass null",
        ),
        (["--data.tokenizer="], "--data.tokenizer is empty, as from a variable that is not set"),
        (["--out", ""], "--out is empty, as from a variable that is not set"),
        (["--out="], "--out is empty, as from a variable that is not set"),
        ([""], "CONFIG is empty, as from a variable that is not set"),
        (["--outt", "d"], "unknown option --outt. Did you mean '--out'?"),
        (["a", "b"], "unexpected argument 'b'"),
        (["--out"], "argument --out: expected one argument. See fourbits fake --help."),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(fourbits, argv, text):
    code, out, err = fourbits(lambda args: 0, *argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert text in err


def test_options_of_a_subcommand_are_suggested_and_debug_works_in_any_position(fourbits):
    def add_arguments(parser):
        action = parser.add_subparsers(required=True).add_parser("prepare", allow_abbrev=False)
        action.add_argument("--out")

    def run(args):
        raise ValueError("bad")

    command = fake(run, add_arguments=add_arguments)
    assert "unknown option --outt. Did you mean '--out'?" in fourbits(command, "prepare", "--outt", "d")[2]
    assert "Traceback" in fourbits(command, "prepare", "--debug")[2]


def test_a_command_without_settings_refuses_unknown_options(capsys):
    with pytest.raises(SystemExit):
        parse("fake", fake(None, overrides=False), ["--optim.lr", "1"])
    assert "unknown option --optim.lr" in capsys.readouterr().err


def test_an_unknown_command_is_refused_with_the_nearest_one(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["docter"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "fourbits: unknown command 'docter'. Did you mean 'doctor'? See fourbits --help.\n"
    )


def test_without_a_command_the_commands_are_listed(capsys):
    assert main([]) == 2
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)


def test_help_does_not_load_torch():
    code = "import sys, fourbits.cli.main as m; m.main([]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_in_the_help_of_a_command_parses(name):
    command = load(name)
    program, word, *argv = shlex.split(command.EXAMPLE)
    assert (program, word) == ("fourbits", name)
    parse(name, command, argv)
    assert command.EXAMPLE in command_parser(name, command).format_help()


def test_doctor_gives_a_reason_for_its_backend(capsys):
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert findings["backend"] == "emulated"
    assert "CPU" in findings["backend_reason"]
    assert "sm_100" in findings["native_blocker"]
    assert "NVIDIA GPU" in findings["scan_blocker"]
    assert findings["compile_error"] is None


def test_a_gpu_out_of_memory_is_reported_with_a_remedy(monkeypatch, capsys):
    def full(*args):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
        )

    monkeypatch.setattr("fourbits.cli.doctor.run", full)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fourbits doctor: CUDA out of memory. Tried to allocate 9.00 GiB."
    assert "train.micro_batch_size" in lines[1]


def test_doctor_without_a_gpu_gives_no_verdict_on_one(capsys):
    assert main(["doctor", "--device", "cpu", "--native"]) == 1
    out = capsys.readouterr().out
    assert "FP4 tensor cores: not checked: Triton kernels need an NVIDIA GPU" in out


def test_doctor_states_that_native_fp4_is_unverified(capsys):
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "not yet run on Blackwell hardware" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_any_command_with_one_line_and_its_code(fourbits, name, code):
    cleaned = []

    def body(args):
        try:
            signal.raise_signal(signal.Signals[name])
        finally:
            cleaned.append(True)
        return 0

    before = [signal.getsignal(each) for each in signal.Signals]
    got, out, err = fourbits(body)
    assert (got, out, cleaned) == (code, "", [True])
    assert err == f"fourbits fake: stopped by {'Ctrl-C' if name == 'SIGINT' else name}.\n"
    assert [signal.getsignal(each) for each in signal.Signals] == before


def test_a_request_to_save_or_record_outside_of_training_ends_nothing(fourbits):
    def body(args):
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        return 0

    said = "fourbits fake: nothing to save yet\nfourbits fake: nothing to record yet\n"
    assert fourbits(body) == (0, "", said)


def test_python_m_fourbits_is_the_command():
    """Its help, version and errors are those of `fourbits`, as is the exit code."""

    def ran(*command):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    script = "import sys; from fourbits.cli.main import main; sys.exit(main())"
    for arguments in (["--help"], ["--version"], ["recipes", "--help"], ["trian"]):
        found = ran(sys.executable, "-m", "fourbits", *arguments)
        assert found == ran(sys.executable, "-c", script, *arguments)
        assert "__main__" not in "".join(found[1:])
    assert ran(sys.executable, "-m", "fourbits", "--help")[1].startswith("usage: fourbits COMMAND")


def test_a_request_that_comes_after_the_end_does_not_kill_the_exiting_process():
    """Python resets its own handlers when it exits, and with the system's default both signals kill."""
    script = (
        "import atexit, os, signal, sys; from fourbits.__main__ import command\n"
        "sys.argv = ['fourbits', '--version']\n"
        "atexit.register(lambda: [os.kill(os.getpid(), each) for each in (signal.SIGUSR1, signal.SIGUSR2)])\n"
        "sys.exit(command())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
