"""SIGUSR2 and --profile record a step: what is written, what goes wrong, and that no bit changes."""

import errno
import gzip
import json
import os
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fourbits.settings import override
from fourbits.train import recording
from fourbits.train.listener import RunListener
from fourbits.train.ranks.ranks import RankRequests, Ranks
from fourbits.train.recording import Recording
from fourbits.train.run import run
from fourbits.train.step_recorder import StepRecorder, unused_name
from fourbits.train.step_result import PendingStep
from fourbits.train.stop import StopRequest
from support.spiking import INFINITE, SPIKE, inject, of_data
from support.torchrun import timeless

CPU = torch.device("cpu")
ASKS = RankRequests(record=True)


class Asks(RunListener):
    """Sends SIGUSR2 to this process after each of these steps, and after each of these validations."""

    def __init__(self, steps=(), validations=()):
        self.steps, self.validations, self.notes = steps, validations, []

    def note(self, text):
        self.notes.append(text)

    def step(self, record):
        if record["step"] in self.steps:
            os.kill(os.getpid(), signal.SIGUSR2)

    def validation(self, record):
        if record["step"] in self.validations:
            os.kill(os.getpid(), signal.SIGUSR2)


@pytest.fixture(scope="module")
def undisturbed(config, data_cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    run(config, out, stop=StopRequest(), data_cache=data_cache)
    return out


@pytest.fixture(scope="module")
def asked(config, data_cache, tmp_path_factory):
    """A run that got signals after step 3, while step 4 was recorded, in the validation after step 8, and
    after the last step; and what it said."""
    out, listener = tmp_path_factory.mktemp("runs") / "asked", Asks(steps=(3, 4, 12), validations=(8,))
    before = signal.getsignal(signal.SIGUSR2)
    run(config, out, listener=listener, data_cache=data_cache)
    assert signal.getsignal(signal.SIGUSR2) == before
    return out, listener.notes


def same_bits(one, other):
    assert timeless(one) == timeless(other)
    files = sorted(each.relative_to(one) for each in one.glob("checkpoints/step_*/*.safetensors"))
    assert len(files) == 4
    assert all((one / each).read_bytes() == (other / each).read_bytes() for each in files)


def test_a_request_changes_no_bit_of_the_run(asked, undisturbed):
    same_bits(undisturbed, asked[0])


def test_the_step_after_a_signal_is_recorded_and_requests_during_a_recording_are_one(asked):
    out, notes = asked
    found = sorted(path.relative_to(out).as_posix() for path in out.glob("profiles/**/*") if path.is_file())
    assert found == ["profiles/step_4/trace_rank0.json.gz", "profiles/step_9/trace_rank0.json.gz"]
    assert notes.count("recording the next step, then continuing") == 4
    assert "no step was left to record" in notes
    (said,) = [note for note in notes if note.startswith(f"step 4: recorded in {out}/profiles/step_4: trace")]
    assert "open it in https://ui.perfetto.dev" in said
    assert "A memory snapshot needs CUDA" in said


def test_the_trace_has_both_passes_with_shapes_and_allocations(asked):
    trace = json.loads(gzip.decompress((asked[0] / "profiles/step_4/trace_rank0.json.gz").read_bytes()))
    events = trace["traceEvents"]
    named = {}
    for event in events:
        named.setdefault(event["name"], []).append(event)
    # linear layers of an M-*- model outside of the blocks kept in BF16, in two micro-batches
    assert len(named["_QuantizedMatmul"]) == len(named["_QuantizedMatmulBackward"]) > 0
    assert len(named["_Scan"]) == len(named["_ScanBackward"]) == 2
    assert any(name.startswith("Optimizer.step") for name in named)
    assert any(event["args"].get("Input Dims") for event in named["aten::mm"])
    assert any(event["args"]["Bytes"] > 0 for event in named["[memory]"])


@pytest.mark.parametrize("fault", ["a file in its place", "a full disk", "a profiler that fails"])
def test_a_recording_that_fails_is_reported_and_the_run_continues(
    config, data_cache, undisturbed, tmp_path, monkeypatch, fault
):
    out, listener = tmp_path / "run", Asks(steps=(3,))
    if fault == "a file in its place":
        out.mkdir()
        (out / "profiles").write_text("mine")
    elif fault == "a full disk":

        def full(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        monkeypatch.setattr(recording, "open_synced", full)
    else:

        def broken(self):
            raise RuntimeError("CUPTI is in use")

        monkeypatch.setattr(Recording, "start", broken)
    run(config, out, listener=listener, data_cache=data_cache)
    (said,) = [note for note in listener.notes if note.startswith("step 4: ")]
    reason = {"a file in its place": "File exists", "a full disk": "No space left on device"}
    assert f": {reason.get(fault, 'CUPTI is in use')}. The run continues without it. Remove" in said
    assert not [each for each in out.glob("profiles/**/*") if each.is_file()]
    same_bits(undisturbed, out)


def test_a_trace_that_the_profiler_could_not_write_is_an_error_and_nothing_stays(tmp_path):
    """PyTorch only logs that it failed."""
    found = Recording(CPU)
    found.start()
    torch.ones(3).add_(1)
    found.stop()
    with pytest.raises(OSError, match="PyTorch's profiler could not write it, perhaps for lack of space"):
        found.write_trace(tmp_path / "missing" / "trace_rank0.json.gz")
    assert list(tmp_path.iterdir()) == []


def open_in(folder):
    """Bytes on disk of the files that this process holds open in a folder, removed ones included."""
    held = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            if str(each.readlink()).startswith(str(folder)):
                held.append(each.stat().st_blocks * 512)
        except FileNotFoundError:  # the descriptor that lists the folder
            continue
    return held


def test_a_trace_that_does_not_fit_takes_no_space(tmp_path):
    """PyTorch does not close a file that it could not write to its end."""
    found = Recording(CPU)
    found.start()
    for _ in range(2000):
        torch.ones(3).add_(1)
    found.stop()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(OSError, match="PyTorch's profiler could not write it"):
            found.write_trace(tmp_path / "trace_rank0.json.gz")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    assert sum(open_in(tmp_path)) == 0


def test_another_profiler_is_not_ended():
    with profile(activities=[ProfilerActivity.CPU]) as other:
        with pytest.raises(RuntimeError, match="another profiler records this process"):
            Recording(CPU).start()
        torch.ones(3).add_(1)
    assert any(event.name == "aten::add_" for event in other.events() or ())


def recorder(tmp_path, run_step, captures_next=False, early=None, steps=9, step=0, ranks=None, **others):
    train = SimpleNamespace(num_steps=steps)
    trainer = SimpleNamespace(
        step=step,
        device=CPU,
        ranks=ranks or Ranks(CPU),
        run_step=run_step,
        captures_next=captures_next,
        config=SimpleNamespace(train=train),
    )
    notify = others.pop("notify", print)
    return StepRecorder(trainer, tmp_path / "profiles", notify, early, **others)  # type: ignore[arg-type]


def test_an_error_in_a_recorded_step_ends_the_recording(tmp_path):
    def fails():
        raise ValueError("a step that fails")

    with pytest.raises(ValueError, match="a step that fails"):
        recorder(tmp_path, fails).run_step(recorded=True)
    assert not torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    assert list(tmp_path.iterdir()) == []


def test_saves_end_before_files_are_written_and_ranks_wait_until_they_are(tmp_path):
    seen = []

    def names():
        seen.append([each.name for each in (tmp_path / "profiles").glob("*/*")])

    class Waits(Ranks):
        def gathered(self, value):
            names()
            return [value]

    found = recorder(tmp_path, lambda: None, ranks=Waits(CPU), settle=names)
    (tmp_path / "profiles").mkdir()
    found.run_step(recorded=True)
    assert seen == [[], ["trace_rank0.json.gz"]]


def test_a_request_waits_until_graphs_are_captured(tmp_path):
    assert [recorder(tmp_path, None, captures_next=each).due(ASKS) for each in (True, False)] == [False, True]
    assert not recorder(tmp_path, None).due(RankRequests())


def test_what_is_requested_once_waits_until_it_is_served():
    later = RankRequests(signal=15)
    assert later.after(ASKS) == RankRequests(signal=15, record=True)
    assert RankRequests().after(RankRequests(signal=15, save=True)) == RankRequests(save=True)


def test_a_step_that_is_recorded_again_gets_another_folder(tmp_path):
    names = []
    for _ in range(3):
        names.append(unused_name(tmp_path, 12))
        (tmp_path / names[-1]).mkdir()
    assert names == ["step_12", "step_12_2", "step_12_3"]
    assert unused_name(tmp_path, 1) == "step_1"
    assert unused_name(tmp_path / "missing", 1) == "step_1"


def test_profile_records_the_third_step_on_a_cpu_too_and_validates_and_saves_as_ever(
    config, data_cache, tmp_path
):
    often = override(
        config, {"train.steps": 4, "train.checkpoint_interval": 2, "train.validation_interval": 1}
    )
    run(often, tmp_path / "plain", stop=StopRequest(), data_cache=data_cache)
    profiles = []
    profiled = run(
        often, tmp_path / "run", stop=StopRequest(), data_cache=data_cache, on_profile=profiles.append
    )
    assert profiled["ended"] == "finished"
    assert [path.name for path in (tmp_path / "run" / "profiles").iterdir()] == ["step_3"]
    assert profiles == [], "a CPU has no kernels with times"
    same_bits(tmp_path / "plain", tmp_path / "run")


def test_profile_needs_three_steps(tmp_path):
    recorder(tmp_path, None, early=print, steps=3)
    with pytest.raises(ValueError, match=r"--profile: needs 3 remaining steps, the run has 2\. Raise"):
        recorder(tmp_path, None, early=print, steps=2)


def test_what_a_killed_process_left_of_a_recording_is_removed(tmp_path):
    folder = tmp_path / "profiles" / "step_4"
    folder.mkdir(parents=True)
    kept = folder / "trace_rank0.json.gz"
    for name in (kept.name, "trace_rank1.json.tmp.tmp", "trace_rank2.json.gz.tmp"):
        (folder / name).touch()
    recorder(tmp_path, None, ranks=Ranks(CPU, rank=1, world=3))
    assert len(list(folder.iterdir())) == 3, "only rank 0 removes"
    recorder(tmp_path, None)
    assert list(folder.iterdir()) == [kept]


def test_a_run_that_continues_does_not_fail_for_lack_of_steps_to_profile(tmp_path):
    """A launcher restarts it with the same options."""
    said = []
    found = recorder(tmp_path, lambda: "done", early=print, steps=9, step=7, notify=said.append)
    assert said == [
        "--profile: needs 3 remaining steps, the run has 2. The run continues without a recording."
    ]
    assert [found.due(each) for each in (RankRequests(), ASKS)] == [False, True]


def test_a_signal_in_the_last_validation_is_answered(config, data_cache, tmp_path):
    listener = Asks(validations=(4,))
    run(override(config, {"train.steps": 4}), tmp_path / "run", listener=listener, data_cache=data_cache)
    assert listener.notes.count("recording the next step, then continuing") == 1
    assert listener.notes.count("no step was left to record") == 1


class AsksBefore(Asks):
    """Sends no signal after a rollback."""

    def rollback(self, record):
        self.steps = ()


def test_a_request_is_served_once_if_the_recorded_step_is_rolled_back(
    config, data_cache, tmp_path, monkeypatch
):
    inject(monkeypatch.setattr, INFINITE, of_data)
    back = {"train.non_finite": "rollback", "train.rollback_steps": 2, "train.checkpoint_interval": 3}
    listener = AsksBefore(steps=(SPIKE - 1,))
    run(override(config, back), tmp_path / "run", listener=listener, data_cache=data_cache)
    assert [each for each in listener.notes if f"step {SPIKE}: rolled back" in each]
    assert [path.name for path in (tmp_path / "run" / "profiles").iterdir()] == [f"step_{SPIKE}"]


class SavesAt4(RunListener):
    """Sends SIGUSR1 when step 3 is logged, which a device that is behind lets happen after step 4."""

    def step(self, record):
        if record["step"] == 3:
            os.kill(os.getpid(), signal.SIGUSR1)


def test_a_request_to_save_survives_a_validation_that_waits_for_the_device(
    config, data_cache, tmp_path, monkeypatch
):
    monkeypatch.setattr(PendingStep, "in_flight", property(lambda self: True))
    kept = override(config, {"train.keep_checkpoints": 9})
    run(kept, tmp_path / "run", listener=SavesAt4(), data_cache=data_cache)
    saved = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert saved == {"step_4", "step_5", "step_10", "step_12"}
