import json
from pathlib import Path

import pytest

from fourbits.train.metrics import FolderChangedError, MetricsFile, read_metrics


def record(step, kind="train"):
    return {"kind": kind, "step": step, "loss": 1 / step}


@pytest.fixture
def path(tmp_path):
    """Steps 1 to 4 with a validation after step 2."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, 0) as metrics:
        for line in (record(1), record(2), record(2, "validation"), record(3), record(4)):
            metrics.append(line)
    return path


def test_a_line_is_on_disk_when_append_returns(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, 0) as metrics:
        metrics.append(record(1))
        assert read_metrics(path) == [record(1)]


@pytest.mark.parametrize("last_step", [0, 1, 2, 3, 4])
def test_opening_after_a_step_removes_later_lines_and_keeps_the_bytes_of_earlier_ones(path, last_step):
    before = path.read_bytes().splitlines(keepends=True)
    kept = b"".join(line for line in before if json.loads(line)["step"] <= last_step)
    MetricsFile(path, last_step).__exit__()
    assert path.read_bytes() == kept


def without_line(path, number):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:number] + [b"garbage\n"] + lines[number + 1 :]))


@pytest.mark.parametrize(
    ("damage", "reached"),
    [
        (lambda path: without_line(path, 2), 2),
        (lambda path: path.write_bytes(b""), 0),
        (lambda path: path.unlink(), 0),
    ],
    ids=["damaged line", "empty", "missing"],
)
def test_records_that_do_not_reach_the_checkpoint_are_refused_and_kept(path, damage, reached):
    damage(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ValueError, match=f"end at step {reached}, but the run has a checkpoint of step 4"):
        MetricsFile(path, 4)
    assert (path.read_bytes() if path.is_file() else None) == before


def delete(lines):
    return [lines[0], *lines[2:]]


def double(lines):
    return [*lines[:2], *lines[1:]]


def swap(lines):
    return [lines[1], lines[0], *lines[2:]]


@pytest.mark.parametrize("change", [delete, double, swap])
def test_a_line_that_does_not_follow_the_one_before_is_named(path, change):
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    line = {delete: 2, double: 3, swap: 1}[change]
    with pytest.raises(ValueError, match=rf"metrics\.jsonl, line {line}: damaged: .* of step \d follows"):
        MetricsFile(path, 4)


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [line for line in lines if b"validation" not in line],
        lambda lines: [*lines[:3], lines[2], *lines[3:]],
        lambda lines: [lines[0].replace(b"1.0", b"1.5"), *lines[1:]],
    ],
    ids=["validation deleted", "validation doubled", "number changed"],
)
def test_any_other_change_of_a_line_is_found_by_the_hash_in_the_checkpoint(path, change):
    with MetricsFile(path, 4) as metrics:
        sha256 = metrics.sha256
        metrics.append(record(5))
        longer = metrics.sha256
    MetricsFile(path, 5, longer).__exit__()
    MetricsFile(path, 4, sha256).__exit__()
    before = b"".join(change(path.read_bytes().splitlines(keepends=True)))
    path.write_bytes(before)
    with pytest.raises(ValueError, match="damaged: a line up to the checkpoint's step was changed"):
        MetricsFile(path, 4, sha256)
    assert path.read_bytes() == before


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.rename(path.with_suffix(".1"))])
@pytest.mark.parametrize("successor", [False, True])
def test_a_file_that_is_removed_or_rotated_is_noticed_at_the_next_line(path, change, successor):
    with MetricsFile(path, 4) as metrics:
        change(path)
        if successor:
            path.touch()
        with pytest.raises(FolderChangedError, match=r"metrics\.jsonl: was moved, removed or replaced"):
            metrics.append(record(5))


def test_an_incomplete_last_line_is_not_a_record_and_is_removed(path):
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "train", "st')
    assert read_metrics(path)[-1] == record(4)
    with MetricsFile(path, 4) as metrics:
        metrics.append(record(5))
    assert path.read_bytes() == whole + (json.dumps(record(5)) + "\n").encode()


def test_a_damaged_line_is_named(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\0\0\0\n", *lines[2:]]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: damaged"):
        read_metrics(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_lacks_becomes_null(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, 0) as metrics:
        metrics.append({"kind": "train", "step": 1, "loss": value})
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["loss"] is None


def test_a_float_is_read_back_exactly(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, 0) as metrics:
        metrics.append({"kind": "train", "step": 1, "loss": 2.0 / 3.0})
    assert read_metrics(path)[0]["loss"] == 2.0 / 3.0
