"""A full disk at any write names the file and the remedy, and costs the steps since the last checkpoint."""

import errno
import json
import resource
import shutil
from typing import NamedTuple

import pytest

from fourbits.cli.errors import describe
from fourbits.data import whole_file
from fourbits.train.checkpoint import checkpoints
from fourbits.train.listener import RunListener
from fourbits.train.metrics import MEASURED, read_metrics
from fourbits.train.run import run
from fourbits.train.stop import StopRequest


class Usage(NamedTuple):
    """As of shutil.disk_usage."""

    total: int
    used: int
    free: int


@pytest.fixture
def train(config, data_cache):
    def start(out, listener=None):
        return run(config, out, listener=listener, stop=StopRequest(), data_cache=data_cache)

    return start


@pytest.fixture(scope="module")
def expected(config, data_cache, tmp_path_factory):
    """The weights and records of a run on an empty disk."""
    out = tmp_path_factory.mktemp("empty disk")
    run(config, out, stop=StopRequest(), data_cache=data_cache)
    return content(out)


def content(out):
    newest = checkpoints(out / "checkpoints")[-1]
    records = [{k: v for k, v in r.items() if k not in MEASURED} for r in read_metrics(out / "metrics.jsonl")]
    return newest.name, {file.name: file.read_bytes() for file in newest.glob("*.safetensors")}, records


def unfinished(out):
    return [path.name for path in out.rglob("*") if path.name.endswith(".tmp") or "unfinished" in path.name]


@pytest.mark.parametrize(
    "name", ["config.yaml", "manifest.json", "tokenizer.json", "state.json", "summary.json"]
)
def test_the_file_is_named_nothing_half_written_stays_and_the_run_goes_on(
    train, expected, tmp_path, monkeypatch, name
):
    write = whole_file.write

    def full(file, content):
        if file.name.endswith(f"{name}.tmp"):
            write(file, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device", file.name)
        write(file, content)

    with monkeypatch.context() as patch:
        patch.setattr(whole_file, "write", full)
        with pytest.raises(OSError, match="No space left") as error:
            train(tmp_path)
    shown = describe(error.value)
    assert ("step_5" if name == "state.json" else name) in shown
    assert "Free some space and rerun the command" in shown
    assert unfinished(tmp_path) == []
    assert train(tmp_path)["ended"] == "finished"
    assert content(tmp_path) == expected


class Fills(RunListener):
    """Lets metrics.jsonl grow no further after a step, as a full disk would."""

    def __init__(self, out, step):
        self.out, self.after = out, step

    def step(self, record):
        if record["step"] == self.after:
            size, hard = (
                (self.out / "metrics.jsonl").stat().st_size,
                resource.getrlimit(resource.RLIMIT_FSIZE)[1],
            )
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))


def test_a_line_of_metrics_that_does_not_fit_names_the_file_and_is_written_again(train, expected, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(OSError, match="File too large") as error:
            train(tmp_path, Fills(tmp_path, 7))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.filename == str(tmp_path / "metrics.jsonl")
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[7])["kind"] == "train"
    train(tmp_path)
    assert content(tmp_path) == expected


def test_a_disk_without_room_for_its_checkpoints_is_refused_before_the_first_step(
    train, tmp_path, monkeypatch
):
    train(tmp_path / "first")
    size = sum(f.stat().st_size for f in (tmp_path / "first" / "checkpoints" / "step_12").glob("[mo]*"))
    for room, fits in ((3, True), (2.5, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, room=room: Usage(0, 0, int(room * size)))
        if fits:
            assert train(tmp_path / f"{room}")["ended"] == "finished"
            continue
        with pytest.raises(OSError, match=r"3 checkpoints of .* exist at a time .* Free some space"):
            train(tmp_path / f"{room}")
        assert not (tmp_path / f"{room}" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("code", "remedy"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)])
def test_every_error_about_a_full_disk_is_shown_with_the_remedy_once(code, remedy):
    for text in ("no room", "no room. Free some space and rerun the command"):
        shown = describe(OSError(code, text, "x.bin"))
        assert shown.count("Free some space") == (remedy or "Free" in text)
