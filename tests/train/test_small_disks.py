"""On a disk of any size a run finishes, or ends with an error that names file and remedy and loses nothing.

Disks are tmpfs of known size, which only root can mount; Linux accounts for them in pages of 4 KiB.
"""

import json
import re
import subprocess
from contextlib import contextmanager

import pytest

from fourbits.cli.main import main
from fourbits.settings import override
from fourbits.train import session
from fourbits.train.checkpoint import checkpoints, open_checkpoint, step_of
from fourbits.train.metrics import read_metrics
from support.kills import same_end
from support.torchrun import timeless, written

PAGE, STEPS, INTERVAL = 4096, 7, 2
#: pages from one size to the next, and how many sizes in a row have to suffice until larger ones do, too
STRIDE, ENOUGH = 3, 8


@contextmanager
def disk(place, pages):
    """A tmpfs of so many pages, and a function that changes how many."""
    place.mkdir()
    options = f"size={pages * PAGE}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        place.rmdir()
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield lambda more: subprocess.run(
            ["mount", "-o", f"remount,size={more * PAGE}", place], check=True, capture_output=True
        )
    finally:
        subprocess.run(["umount", "-l", place], check=True)
        place.rmdir()


@pytest.fixture(scope="module")
def command(config, data, tmp_path_factory):
    """A run that saves often, on text prepared elsewhere."""
    settings = {"steps": STEPS, "checkpoint_interval": INTERVAL, "validation_interval": 3}
    changes = {f"train.{name}": value for name, value in settings.items()}
    changed = override(config, {**changes, "data.paths": [str(data.folder)]})
    return ["train", written(changed, tmp_path_factory.mktemp("config")), "--out"]


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """An undisturbed run, and the pages of its largest checkpoint."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main([*command, str(out)]) == 0
    sizes = ([file.stat().st_size for file in path.iterdir()] for path in checkpoints(out / "checkpoints"))
    return out, max(sum(1 + -(-size // PAGE) for size in each) for each in sizes)


def assert_ended_well(out, error):
    """What must hold after a run that ended for lack of space."""
    assert re.search(
        rf"^fourbits train: .*{out.parent}.*Free some space and rerun the command", error, re.M
    ), error
    assert not [path.name for path in out.rglob("*") if path.suffix == ".tmp" or "unfinished" in path.name]
    saved = [step_of(open_checkpoint(path).path) for path in checkpoints(out / "checkpoints")]
    metrics = out / "metrics.jsonl"
    done = max((record["step"] for record in read_metrics(metrics)), default=0) if metrics.is_file() else 0
    newest = INTERVAL * ((done - 1) // INTERVAL)  # it was saved before the next step began
    assert newest <= 0 or newest in saved, (done, saved)
    if (out / "summary.json").is_file():
        assert json.loads((out / "summary.json").read_text())["ended"] in ("failed", "finished")


@pytest.mark.slow
@pytest.mark.parametrize("checked", [True, False], ids=["checked at the start", "filled after the check"])
def test_at_every_size_a_run_finishes_or_ends_with_a_named_error_and_continues_with_more_room(
    command, whole, tmp_path, monkeypatch, capsys, checked
):
    undisturbed, largest = whole
    if not checked:
        monkeypatch.setattr(session, "require_space", lambda *_: None)
    pages = 3 * largest - 5 * STRIDE if checked else 1  # three checkpoints at a time are what is checked
    finished = []
    while finished[-ENOUGH:] != [True] * ENOUGH:
        assert pages < 5 * largest
        with disk(tmp_path / "disk", pages) as resize:
            out = tmp_path / "disk" / "run"
            capsys.readouterr()
            code = main([*command, str(out)])
            finished.append(code == 0)
            if code:
                assert_ended_well(out, capsys.readouterr().err)
                resize(5 * largest)
                assert main([*command, str(out)]) == 0, pages
            same_end(out, undisturbed)
            assert timeless(out) == timeless(undisturbed), pages
        pages += STRIDE
    assert not finished[0]
