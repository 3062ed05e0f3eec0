"""Errors of the command line: subject, rule, value, remedy, for every kind of wrong file and number."""

import json
from pathlib import Path

import pytest

from fourbits.bench.native_report.measure import FORM
from fourbits.cli.main import main

ABSENT = ("No such file or directory", "Correct the path, or create what it names.")
FOLDER = ("Is a directory", "Pass a file in place of the folder.")
MAPPING = "must hold a mapping of keys to values"
REPORT = "Write one with `fourbits doctor --native --report FILE.json`."
WHOLE = "must be a whole number"
GPUS = "must be a whole number from 1 to 1,000,000"
PLAN = "plan tiny --gpu h100"

#: command, then what its error says in this order; the last is the remedy
CASES: list[tuple[str, *tuple[str, ...]]] = [
    ("plan absent.yaml --gpu h100", "absent.yaml: ", *ABSENT),
    ("lint absent.yaml", "absent.yaml: ", *ABSENT),
    ("train absent.yaml", "absent.yaml: ", *ABSENT),
    ("compare absent.yaml", "absent.yaml: ", *ABSENT),
    ("bench model --preset absent.yaml", "absent.yaml: ", *ABSENT),
    (f"{PLAN} --calibration absent.json", "absent.json: ", *ABSENT),
    ("plan folder.yaml --gpu h100", "folder.yaml: ", *FOLDER),
    ("lint folder.yaml", "folder.yaml: ", *FOLDER),
    (f"{PLAN} --calibration folder", "folder: ", *FOLDER),
    (
        "lint folder",
        "config: must be a preset or a .yaml file",
        "got the folder folder",
        "Name a file in it.",
    ),
    ("lint list.yaml", "list.yaml: ", MAPPING, "got a list", "Write it as lines of `key: value`."),
    ("lint text.yaml", "text.yaml: ", MAPPING, "got only 'words'", "Write it as lines of `key: value`."),
    ("lint empty.yaml", "empty.yaml: ", MAPPING, "got an empty file", "Write it as lines"),
    ("lint binary.yaml", "binary.yaml: ", "must be UTF-8 text", "byte 0 is not", "Pass a .yaml file."),
    ("lint broken.yaml", "broken.yaml, line 1: ", "not valid YAML", "Correct the line."),
    ("lint partial.yaml", "partial.yaml: ", "needs a value for train", "got none", "Add its key."),
    ("lint tiny --recipe list.yaml", "list.yaml: ", MAPPING, "got a list", "Write it as lines"),
    (
        f"{PLAN} --calibration list.json",
        "list.json must hold an object",
        "got a list",
        "Pass a file of bench",
    ),
    (f"{PLAN} --calibration binary.yaml", "binary.yaml is not JSON", "Pass a file of bench calibrate."),
    (
        f"{PLAN} --html folder",
        "--html: ",
        "must be a file",
        "'folder': folder is a folder",
        "Pass one such as",
    ),
    (f"{PLAN} --html no/a.html", "--html: ", "must be a file", "'no/a.html'", "Pass one such as plan.html."),
    ("bench calibrate --out folder", "--out: ", "must be a file", "'folder'", "Pass one such as rates.json."),
    ("bench calibrate --out no/a.json", "--out: ", "must be a file", "'no/a.json'", "Pass one such as"),
    ("doctor --native --report no/a.json", "--report: ", "must be a file", "'no/a.json'", "Pass one such as"),
    ("doctor --native --report a.txt", "--report: ", "must end in .json", "got 'a.txt'", "Rename it."),
    ("doctor --verify absent.json", "--verify: ", "'absent.json' must be a report", "No such file", REPORT),
    ("doctor --verify folder", "--verify: ", "'folder' must be a report", "Is a directory", REPORT),
    ("doctor --verify list.json", "--verify: ", "must hold an object", "got a list", REPORT),
    ("doctor --verify empty.yaml", "--verify: ", "must be a report", "Expecting value", REPORT),
    (
        "doctor --verify form.json",
        "--verify: ",
        "must be there",
        "got a report without it",
        "Write the report",
    ),
    ("doctor --verify form.json --json", "--verify: ", "takes no --json", "got both", "Leave one out."),
    ("doctor --device tpu", "device 'tpu': ", "must be present on this machine", "Choose one of these"),
    ("plan tiny --gpu h1000", "gpu: ", "must be one of a100", "got 'h1000'", "Did you mean 'h100'?"),
    ("plan tiny --gpu mine", "gpu: ", "must be one of a100", "got 'mine'", "Pass the one that is most like"),
    *(
        (f"{PLAN} --gpus {value}", "--gpus: ", GPUS, f"got '{value}'", "Pass the GPUs of your cluster")
        for value in ("0", "-3", "nan", "1.5", "9999999", "x")
    ),
    *(
        (f"{PLAN} --price {value}", "--price: ", "from 0 to 1,000,000", f"got '{value}'", "Pass what you pay")
        for value in ("-1", "nan", "inf", "1e308", "x")
    ),
    *(
        (
            f"lint tiny --{name} {value}",
            f"{name}: ",
            "must be from 1 to 1,000,000",
            f"got {value}",
            "Pass the number",
        )
        for name in ("gpus", "tensor")
        for value in (0, -3, 10**20)
    ),
    *(
        (f"lint tiny --gpus {value}", "--gpus: ", WHOLE, f"got '{value}'", "Pass one such as 8")
        for value in ("1.5", "nan", "1e3", "x")
    ),
    (
        "lint tiny --gpus 8 --tensor 16",
        "tensor: ",
        "must divide the number of GPUs, 8",
        "got 16",
        "Pass another",
    ),
    ("compare tiny --jobs 0", "--jobs ", "must be at least 1", "got 0", "Omit it for a number that fits"),
    ("eval folder --batch x", "--batch: ", WHOLE, "got 'x'", "Pass one such as 8"),
    (
        "generate folder --top-p nan",
        "--top-p: ",
        "must be a finite number",
        "got 'nan'",
        "Pass one such as 0.5",
    ),
    ("bench model --preset tiny --repeats 0", "repeats ", "must be at least 1", "got 0", "Omit --repeats"),
    ("bench generate --batch 0", "--batch: ", "must be at least 1", "got 0", "Omit it for its default."),
    ("bench ssd --preset mine", "--preset: ", "must be one of tiny", "got 'mine'", "Pass one of these"),
    (
        "lint tiny --train.steps 0",
        "train: steps ",
        "must be at least 1",
        "got 0",
        "Set the length of the run",
    ),
    (
        "lint tiny --train.seq_len 0",
        "train: seq_len ",
        "must be at least 1",
        "got 0",
        "Set it to 256, the default.",
    ),
    ("lint tiny --train.seq_len x", "train.seq_len ", WHOLE, "got 'x'", "Write one such as 8."),
    ("lint tiny --train.time_limit 0", "time_limit ", "must be above 0 minutes", "got 0.0", "Set it to null"),
    ("lint tiny --optim.lr nan", "optim.lr ", "must be a number", "got 'nan'", "Write one such as 0.5."),
    ("lint tiny --optim.lr 0", "optim: lr ", "must be above 0", "got 0.0", "Set it to 0.001, the default."),
    ("lint tiny --parallel.tensor 0", "parallel: tensor ", "must be at least 1", "got 0", "Set it to 1"),
    ("lint tiny --parallel.shard 0", "parallel: shard ", "must be at least 1", "got 0", "Set it to null"),
    ("lint tiny --parallel.timeout 0", "parallel: timeout ", "above 0 seconds", "got 0.0", "Set it to 900"),
    ("lint tiny --parallel.gather x", "parallel.gather ", "must be one of", "got 'x'", "Choose one of them."),
    ("lint tiny --data.max_epochs 0", "data: max_epochs ", "must be above 0", "got 0.0", "Set it to null"),
    ("lint tiny --model.d_model 0", "model: d_model ", "must be at least 1", "got 0", "Set it."),
    ("lint tiny --model.pattern X", "model: pattern ", "one letter per block", "got 'X'", "Write it as in"),
    ("lint tiny --recipe.fprop.lhs.rht 3", "rht: ", "must be one of", "got 3", "Pass 0 for no transform."),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with one file of each wrong kind."""
    for name in ("folder", "folder.yaml"):
        (tmp_path / name).mkdir()
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "text.yaml").write_text("words\n")
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "binary.yaml").write_bytes(b"\xff\x00\x9a")
    (tmp_path / "broken.yaml").write_text("a: b: c\n")
    (tmp_path / "partial.yaml").write_text("model: tiny\n")
    (tmp_path / "list.json").write_text("[1]\n")
    (tmp_path / "form.json").write_text(json.dumps({"form": FORM}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that is refused writes; nothing goes to stdout."""
    try:
        code = main(command.split())
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    return err


def missing_part(error: str, parts: tuple[str, ...]) -> str | None:
    """The first of the parts that does not follow the ones before it; a remedy ends a sentence before it."""
    at = 0
    for part in parts:
        found = error.find(part, at)
        if found < 0:
            return part
        at = found + len(part)
    before = error[: error.rindex(parts[-1])].rstrip("`")
    return None if before.endswith((". ", "? ")) else f"a sentence: {parts[-1]}"


@pytest.mark.parametrize(
    ("command", "parts"), [(case[0], case[1:]) for case in CASES], ids=lambda x: str(x)[:50]
)
def test_an_error_has_a_subject_a_rule_a_value_and_a_remedy(command, parts, capsys):
    error = error_of(command, capsys)
    assert missing_part(error, parts) is None, error
    assert error.startswith(f"fourbits {command.split()[0]}")
    assert error.count(f"{command.split()[0]}: {command.split()[0]}") == 0
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "missing"),
    [
        ("a.yaml: steps must be at least 1, got 0. Set it.", None),
        ("a.yaml: steps must be at least 1, got 0.", "Set it."),
        ("a.yaml: steps must be at least 1. Set it.", "got 0"),
        ("a.yaml: steps must be at least 1, got 0, Set it.", "a sentence: Set it."),
    ],
)
def test_a_part_that_is_missing_is_found(error, missing):
    assert missing_part(error, ("a.yaml: ", "must be at least 1", "got 0", "Set it.")) == missing


def test_a_file_that_may_not_be_written_is_refused_before_anything_is_measured(folder, monkeypatch, capsys):
    monkeypatch.setattr("fourbits.cli.output_file.os.access", lambda path, mode: False)
    monkeypatch.setattr("fourbits.cli.bench.calibrate", lambda *_: pytest.fail("measured first"))
    error = error_of("bench calibrate --out rates.json", capsys)
    assert "'rates.json': rates.json is not writable. Pass one such as rates.json." in error
