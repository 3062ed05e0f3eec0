import json

import pytest

from fourbits.train.metrics import MetricsFile, read_metrics


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
