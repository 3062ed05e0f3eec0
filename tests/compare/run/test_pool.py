"""Parallel runs: the same losses as sequential runs, and no worker outlives the comparison."""

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

from fourbits.compare.run.execute import Interrupted, execute_runs
from fourbits.compare.run.jobs import Jobs, choose_jobs
from fourbits.compare.run.pool import Pool, Worker, WorkerDiedError
from fourbits.compare.run.progress import MatrixProgress, RunProgress
from fourbits.compare.run.run_matrix import RunMatrix, build_matrix
from fourbits.compare.run.worker import portable
from fourbits.device import probe
from fourbits.train.config import RunConfig
from fourbits.train.listener import Record
from fourbits.train.run_folder import RunFolder
from fourbits.train.stop import StopRequest

TWO = Jobs(parallel=2, threads=1)
ONE = Jobs(parallel=1, threads=1)
COMMAND = "fourbits compare small"
# Steps of a run that does not finish before the test stops it.
LONG = 100_000


class Watcher(MatrixProgress):
    """Calls `act` with the workers of this process once both runs have finished two steps."""

    def __init__(self, matrix: RunMatrix, act: Callable[[list[int]], None] | None = None) -> None:
        self.out, self.act = StringIO(), act
        self.workers: list[int] = []
        super().__init__(matrix, Console(file=self.out))
        self.runs: list[RunProgress] = []

    def start_run(self, number: int) -> RunProgress:
        run = super().start_run(number)
        step = run.step

        def watch(record: Record) -> None:
            step(record)
            self.workers = self.workers or children(os.getpid())
            if self.act and [run.last_step >= 2 for run in self.runs] == [True, True]:
                act, self.act = self.act, None
                act(self.workers)

        run.step = watch
        self.runs.append(run)
        return run


def children(parent: int) -> list[int]:
    """Process ids of the workers of a process, oldest first."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes()
            if int(fields[1]) == parent and b"fourbits.compare.run.worker" in command:
                found.append(int(stat.parent.name))
    return sorted(found)


def gone(process: int, seconds: float = 5) -> bool:
    """Whether a process ends within this time."""
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


def matrix_for(config: RunConfig, out: Path, steps: int = 64) -> RunMatrix:
    """Two runs of this many steps, saved only at their end."""
    train = replace(config.train, steps=steps, checkpoint_interval=None, threads=None)
    return build_matrix(replace(config, train=train), "small", ("bf16", "nvfp4"), (0,), out)


def losses(matrix: RunMatrix) -> list[list[float]]:
    """The losses of every step of every run."""
    files = [(run.folder / "metrics.jsonl").read_text().splitlines() for run in matrix.runs]
    return [[json.loads(line).get("loss") for line in lines] for lines in files]


@pytest.fixture(scope="module")
def sequential(small_run: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> RunMatrix:
    matrix = matrix_for(small_run, tmp_path_factory.mktemp("sequential"))
    execute_runs(matrix, Watcher(matrix), COMMAND, ONE)
    return matrix


def test_parallel_runs_have_the_losses_of_sequential_runs(
    sequential: RunMatrix, small_run: RunConfig, tmp_path: Path
):
    matrix = matrix_for(small_run, tmp_path)
    watcher = Watcher(matrix)
    provenance = execute_runs(matrix, watcher, COMMAND, TWO)
    assert losses(matrix) == losses(sequential)
    assert len(watcher.workers) == 2
    assert all(gone(process) for process in watcher.workers)
    lines = watcher.out.getvalue().splitlines()
    for label in ("bf16, seed 0 (1/2): ", "nvfp4, seed 0 (2/2): "):
        found = [line for line in lines if line.startswith(label)]
        assert sum("validation loss" in line for line in found) == 64 // 2 + 1
        assert "finished, validation loss" in found[-1]
    recorded = provenance["bf16/seed0"]
    assert recorded is not None
    assert (recorded.jobs, recorded.threads) == (2, 1)
    stored = [(each.runs[1].folder / "config.yaml").read_text() for each in (matrix, sequential)]
    assert stored[0] == stored[1], "the number of parallel runs is not a setting of a run"


def test_a_killed_worker_is_named_and_the_other_run_is_saved(small_run: RunConfig, tmp_path: Path):
    matrix = matrix_for(small_run, tmp_path, steps=LONG)
    watcher = Watcher(matrix, lambda workers: os.kill(workers[1], signal.SIGKILL))
    with pytest.raises(WorkerDiedError, match="its process was killed by SIGKILL") as caught:
        execute_runs(matrix, watcher, COMMAND, TWO)
    first, second = str(caught.value).splitlines()
    assert first.startswith("nvfp4, seed 0 (2/2): ")
    assert f"{COMMAND} " in second
    assert all(gone(process) for process in watcher.workers)
    assert RunFolder(matrix.runs[0].folder).newest_checkpoint() is not None


def interrupt_this(workers: list[int]) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def terminate_one(workers: list[int]) -> None:
    os.kill(workers[1], signal.SIGTERM)


@pytest.mark.parametrize("act", [interrupt_this, terminate_one])
def test_a_signal_saves_every_run_and_a_sequential_rerun_resumes_to_the_same_losses(
    sequential: RunMatrix, small_run: RunConfig, tmp_path: Path, act: Callable[[list[int]], None]
):
    matrix = matrix_for(small_run, tmp_path)
    watcher = Watcher(matrix, act)
    with pytest.raises(Interrupted):
        execute_runs(matrix, watcher, COMMAND, TWO)
    assert all(gone(process) for process in watcher.workers)
    saved = [RunFolder(run.folder).newest_checkpoint() for run in matrix.runs]
    assert all(checkpoint is not None for checkpoint in saved)
    execute_runs(matrix, Watcher(matrix), COMMAND, ONE)
    assert losses(matrix) == losses(sequential)


def test_a_second_ctrl_c_stops_immediately(small_run: RunConfig, tmp_path: Path):
    matrix = matrix_for(small_run, tmp_path, steps=LONG)

    def twice(workers: list[int]) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    watcher = Watcher(matrix, twice)
    with pytest.raises(KeyboardInterrupt):
        execute_runs(matrix, watcher, COMMAND, TWO)
    assert len(watcher.workers) == 2
    assert all(gone(process) for process in watcher.workers)


def test_workers_exit_when_their_parent_is_killed(small_run: RunConfig, small_config: Path, tmp_path: Path):
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


def test_an_error_in_a_worker_is_raised_as_in_a_sequential_run(small_run: RunConfig, tmp_path: Path):
    matrix = matrix_for(small_run, tmp_path)
    checkpoint = matrix.runs[1].folder / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ValueError) as parallel:
        execute_runs(matrix, Watcher(matrix), COMMAND, TWO)
    with pytest.raises(ValueError) as sequential:
        execute_runs(matrix, Watcher(matrix), COMMAND, ONE)
    assert str(parallel.value) == str(sequential.value)
    assert "no config.yaml" in str(sequential.value)


def test_an_error_that_cannot_be_pickled_keeps_its_text_and_traceback():
    class LocalError(Exception):
        pass

    try:
        raise LocalError("a layer is odd")
    except LocalError as error:
        sent = portable(error)
    assert str(sent) == "LocalError: a layer is odd"
    assert "test_pool.py" in sent.__notes__[-1]
    named = FileNotFoundError(2, "No such file or directory", "text.txt")
    assert portable(named) is named


@pytest.mark.parametrize(
    ("requested", "cores", "settings", "width", "expected"),
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
def test_jobs_depend_on_the_model_the_machine_and_the_request(
    small_run: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    requested: int | None,
    cores: int,
    settings: dict[str, int],
    width: int,
    expected: tuple[int, int],
):
    monkeypatch.setattr("torch.get_num_threads", lambda: cores)
    model = replace(small_run.model, d_model=width, d_ffn=width)
    config = replace(small_run, model=model, train=replace(small_run.train, **{"threads": None, **settings}))
    matrix = build_matrix(config, "small", ("bf16", "fp8", "nvfp4"), (0, 1), tmp_path)
    jobs = choose_jobs(matrix, requested)
    assert (jobs.parallel, jobs.threads) == expected


@pytest.mark.parametrize(
    ("allowed", "requested", "expected"),
    [
        (None, None, (3, ("0", "1", "2"))),
        ("5, GPU-1a2b,0", None, (3, ("5", "GPU-1a2b", "0"))),
        (None, 6, (6, ("0", "1", "2"))),
        (None, 1, (1, ("0", "1", "2"))),
    ],
)
def test_by_default_each_gpu_executes_one_run(
    small_run: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allowed: str | None,
    requested: int | None,
    expected: tuple[int, tuple[str, ...]],
):
    machine = replace(probe("cpu"), kind="cuda")
    monkeypatch.setattr("fourbits.compare.run.jobs.probe", lambda device: machine)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.get_num_threads", lambda: 12)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    matrix = build_matrix(small_run, "small", ("bf16", "fp8", "nvfp4"), (0, 1), tmp_path)
    jobs = choose_jobs(matrix, requested)
    assert (jobs.parallel, jobs.gpus) == expected


def test_parallel_runs_share_the_gpus_out_among_themselves(
    small_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[str] = []

    class Idle(Worker):
        def __init__(self, matrix: RunMatrix, threads: int, gpu: str | None = None) -> None:
            super().__init__(matrix, threads, gpu)
            environment = Path(f"/proc/{self.process.pid}/environ").read_bytes().split(b"\0")
            (name,) = (each for each in environment if each.startswith(b"CUDA_VISIBLE_DEVICES="))
            seen.append(name.decode().partition("=")[2])

        def start(self, number: int, run: RunProgress) -> None:
            pass

    monkeypatch.setattr("fourbits.compare.run.pool.Worker", Idle)
    matrix = build_matrix(small_run, "small", ("bf16", "fp8", "nvfp4"), (0,), tmp_path)
    with Pool(matrix, Jobs(3, 1, ("4", "7")), Watcher(matrix), "") as pool:
        pool.execute([0, 1, 2], StopRequest(), lambda worker: None)
    assert seen == ["4", "7", "4"]


def test_zero_jobs_are_refused(small_run: RunConfig, tmp_path: Path):
    with pytest.raises(ValueError, match="--jobs must be at least 1, got 0"):
        choose_jobs(matrix_for(small_run, tmp_path), 0)
