"""Runs side by side: the same losses as one after another, and an end without orphans in every case."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fourbits.compare.execute import Interrupted, make_runs
from fourbits.compare.jobs import Jobs, choose_jobs
from fourbits.compare.plan import Plan, make_plan
from fourbits.compare.pool import RunLostError
from fourbits.compare.progress import CompareReport, RunReport
from fourbits.compare.worker import portable
from fourbits.train.config import RunConfig
from fourbits.train.report import Record
from fourbits.train.run_folder import RunFolder

TWO = Jobs(at_a_time=2, threads=1)
ONE = Jobs(at_a_time=1, threads=1)
COMMAND = "fourbits compare small"
# Steps of a run that does not end before a test ends it.
LONG = 100_000


class Watcher(CompareReport):
    """Calls `act` with the workers of this process once both runs have made two steps."""

    def __init__(self, plan: Plan, act: Callable[[list[int]], None] | None = None) -> None:
        self.out, self.act = StringIO(), act
        self.workers: list[int] = []
        super().__init__(plan, Console(file=self.out))
        self.listeners: list[RunReport] = []

    def listen(self, number: int) -> RunReport:
        listener = super().listen(number)
        step = listener.step

        def watch(record: Record) -> None:
            step(record)
            self.workers = self.workers or children(os.getpid())
            if self.act and [run.last_step >= 2 for run in self.listeners] == [True, True]:
                act, self.act = self.act, None
                act(self.workers)

        listener.step = watch
        self.listeners.append(listener)
        return listener


def children(parent: int) -> list[int]:
    """The workers of a process, oldest first."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            words = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes()
            if int(words[1]) == parent and b"fourbits.compare.worker" in command:
                found.append(int(stat.parent.name))
    return sorted(found)


def gone(process: int, seconds: float = 5) -> bool:
    """Whether a process ends within the time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def plan_for(config: RunConfig, out: Path, steps: int = 64) -> Plan:
    """Two runs of so many steps, saved at their end only."""
    train = replace(config.train, steps=steps, checkpoint_interval=None, threads=None)
    return make_plan(replace(config, train=train), "small", ("bf16", "nvfp4"), (0,), out)


def losses(plan: Plan) -> list[list[float]]:
    """Of every step of every run."""
    files = [(run.folder / "metrics.jsonl").read_text().splitlines() for run in plan.runs]
    return [[json.loads(line).get("loss") for line in lines] for lines in files]


@pytest.fixture(scope="module")
def alone(small_run: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    plan = plan_for(small_run, tmp_path_factory.mktemp("alone"))
    make_runs(plan, Watcher(plan), COMMAND, ONE)
    return plan


def test_side_by_side_gives_the_losses_of_one_after_another(
    alone: Plan, small_run: RunConfig, tmp_path: Path
):
    plan = plan_for(small_run, tmp_path)
    watcher = Watcher(plan)
    comparison = make_runs(plan, watcher, COMMAND, TWO)
    assert losses(plan) == losses(alone)
    assert len(watcher.workers) == 2
    assert all(gone(process) for process in watcher.workers)
    lines = watcher.out.getvalue().splitlines()
    for label in ("bf16, seed 0 (1/2): ", "nvfp4, seed 0 (2/2): "):
        told = [line for line in lines if line.startswith(label)]
        assert sum("validation loss" in line for line in told) == 64 // 2 + 1
        assert "finished, validation loss" in told[-1]
    made = comparison.made["bf16", 0]
    assert made is not None
    assert (made.jobs, made.threads) == (2, 1)
    stored = [(each.runs[1].folder / "config.yaml").read_text() for each in (plan, alone)]
    assert stored[0] == stored[1], "how many run at a time is no setting of a run"


def test_a_killed_worker_is_named_and_the_other_saves(small_run: RunConfig, tmp_path: Path):
    plan = plan_for(small_run, tmp_path, steps=LONG)
    watcher = Watcher(plan, lambda workers: os.kill(workers[1], signal.SIGKILL))
    with pytest.raises(RunLostError, match="its process was killed by SIGKILL") as caught:
        make_runs(plan, watcher, COMMAND, TWO)
    first, second = str(caught.value).splitlines()
    assert first.startswith("nvfp4, seed 0 (2/2): ")
    assert f"{COMMAND} " in second
    assert all(gone(process) for process in watcher.workers)
    assert RunFolder(plan.runs[0].folder).newest_checkpoint() is not None


def interrupt_this(workers: list[int]) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def terminate_one(workers: list[int]) -> None:
    os.kill(workers[1], signal.SIGTERM)


@pytest.mark.parametrize("act", [interrupt_this, terminate_one])
def test_a_signal_saves_every_run_and_one_at_a_time_continues_to_the_same_losses(
    alone: Plan, small_run: RunConfig, tmp_path: Path, act: Callable[[list[int]], None]
):
    plan = plan_for(small_run, tmp_path)
    watcher = Watcher(plan, act)
    with pytest.raises(Interrupted):
        make_runs(plan, watcher, COMMAND, TWO)
    assert all(gone(process) for process in watcher.workers)
    saved = [RunFolder(run.folder).newest_checkpoint() for run in plan.runs]
    assert all(checkpoint is not None for checkpoint in saved)
    make_runs(plan, Watcher(plan), COMMAND, ONE)
    assert losses(plan) == losses(alone)


def test_a_second_ctrl_c_ends_at_once(small_run: RunConfig, tmp_path: Path):
    plan = plan_for(small_run, tmp_path, steps=LONG)

    def twice(workers: list[int]) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    watcher = Watcher(plan, twice)
    with pytest.raises(KeyboardInterrupt):
        make_runs(plan, watcher, COMMAND, TWO)
    assert len(watcher.workers) == 2
    assert all(gone(process) for process in watcher.workers)


def test_workers_end_when_the_process_in_charge_is_killed(
    small_run: RunConfig, small_config: Path, tmp_path: Path
):
    command = [
        sys.executable,
        "-c",
        "from fourbits.cli.main import main; main()",
        "compare",
        str(small_config),
    ]
    command += ["--out", str(tmp_path / "out"), "--jobs", "2", "--train.steps", str(LONG)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "nvfp4" in line and "validation loss" in line:
                break
        workers = children(process.pid)
        process.kill()
    assert len(workers) == 2
    assert all(gone(worker) for worker in workers)


def test_an_error_of_a_worker_is_raised_as_it_would_be_without_one(small_run: RunConfig, tmp_path: Path):
    plan = plan_for(small_run, tmp_path)
    checkpoint = plan.runs[1].folder / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ValueError) as side_by_side:
        make_runs(plan, Watcher(plan), COMMAND, TWO)
    with pytest.raises(ValueError) as alone:
        make_runs(plan, Watcher(plan), COMMAND, ONE)
    assert str(side_by_side.value) == str(alone.value)
    assert "no config.yaml" in str(alone.value)


def test_an_error_that_cannot_travel_keeps_its_text_and_where_it_was_raised():
    class LocalError(Exception):
        pass

    try:
        raise LocalError("a layer is odd")
    except LocalError as error:
        carried = portable(error)
    assert str(carried) == "LocalError: a layer is odd"
    assert "test_pool.py" in carried.__notes__[-1]
    named = FileNotFoundError(2, "No such file or directory", "text.txt")
    assert portable(named) is named


@pytest.mark.parametrize(
    ("asked", "cores", "settings", "width", "expected"),
    [
        (None, 2, {}, 32, (2, 1)),
        (None, 16, {}, 32, (4, 4)),
        (None, 2, {"threads": 2}, 32, (1, 2)),
        (None, 2, {}, 4096, (1, 2)),
        (2, 2, {}, 4096, (2, 1)),
        (1, 2, {}, 32, (1, 2)),
        (3, 2, {}, 32, (3, 1)),
        (99, 2, {}, 32, (6, 1)),
        (2, 8, {"threads": 3}, 32, (2, 3)),
    ],
)
def test_jobs_are_chosen_by_model_machine_and_wish(
    small_run: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: int | None,
    cores: int,
    settings: dict[str, int],
    width: int,
    expected: tuple[int, int],
):
    monkeypatch.setattr("torch.get_num_threads", lambda: cores)
    model = replace(small_run.model, d_model=width, d_ffn=width)
    config = replace(small_run, model=model, train=replace(small_run.train, **{"threads": None, **settings}))
    plan = make_plan(config, "small", ("bf16", "fp8", "nvfp4"), (0, 1), tmp_path)
    jobs = choose_jobs(plan, asked)
    assert (jobs.at_a_time, jobs.threads) == expected


def test_no_run_at_a_time_is_refused(small_run: RunConfig, tmp_path: Path):
    with pytest.raises(ValueError, match="--jobs must be at least 1, got 0"):
        choose_jobs(plan_for(small_run, tmp_path), 0)
