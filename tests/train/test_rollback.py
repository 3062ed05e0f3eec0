"""A run that rolls back goes on without the data since its checkpoint, with the same bits after any stop."""

import json
import math

import pytest
import torch

from fourbits.cli.main import main
from fourbits.compare.report.run_report import write_run_report
from fourbits.data.stream.blend import Phase
from fourbits.evaluate import Loss
from fourbits.settings import override
from fourbits.train import keeper, sinks
from fourbits.train.checkpoint import checkpoints, open_checkpoint
from fourbits.train.continuation import check_phases
from fourbits.train.keeper import CheckpointKeeper, require_space
from fourbits.train.metrics import MEASURED, MetricsFile, read_history
from fourbits.train.non_finite import NonFiniteError
from fourbits.train.opening import with_vocabulary
from fourbits.train.rollback import RollbackCause, RollbackError, RollbackPolicy, Rollbacks
from fourbits.train.run import run
from fourbits.train.stop import StopRequest
from fourbits.train.trainer import Trainer
from support.spiking import INFINITE, SPIKE, SPIKED, inject, of_data
from support.stopper import Stopper

KINDS = pytest.mark.parametrize("kind", [SPIKED, INFINITE])
#: a run rolls back at least 2 steps, and saves every third: from step 9 to step 6
BACK, INTERVAL, TO = 2, 3, 6
LEFT_OUT = SPIKE - TO


class Killed(BaseException):
    """Ends a run like SIGKILL: nothing is written after it."""


@pytest.fixture
def rolling(config):
    settings = {
        "train.checkpoint_interval": INTERVAL,
        "train.rollback_steps": BACK,
        "train.keep_checkpoints": 1,
    }
    return override(config, {**settings, "train.spike": "rollback", "train.non_finite": "rollback"})


@pytest.fixture
def train(rolling, data_cache, tmp_path):
    def start(out="run", after=None, **settings):
        listener = Stopper(after)
        changed = override(rolling, {f"train.{name}": value for name, value in settings.items()})
        summary = run(changed, tmp_path / out, listener=listener, stop=listener.stop, data_cache=data_cache)
        return summary, listener.notes

    return start


def content(out):
    """Everything that must not depend on kills: all records, and the newest checkpoint."""
    newest = checkpoints(out / "checkpoints")[-1]
    parts = read_history(out / "metrics.jsonl")
    records = [[{k: v for k, v in each.items() if k not in MEASURED} for each in part] for part in parts]
    state = open_checkpoint(newest).state
    measured = [state.pop(name) for name in ("metrics", "metrics_size")]
    assert all(measured)
    return (
        newest.name,
        {file.name: file.read_bytes() for file in newest.glob("*.safetensors")},
        records,
        state,
    )


@pytest.fixture
def whole(train, tmp_path, monkeypatch):
    """The content of an undisturbed run on bad data of a kind, which later runs read, too."""

    def of(kind):
        inject(monkeypatch.setattr, kind, of_data)
        if kind not in _whole:
            train("whole")
            _whole[kind] = content(tmp_path / "whole")
        return _whole[kind]

    return of


_whole = {}


@KINDS
def test_a_run_rolls_back_and_keeps_a_record_of_it(train, tmp_path, monkeypatch, kind):
    inject(monkeypatch.setattr, kind, of_data)
    summary, notes = train()
    records, discarded, rollbacks = read_history(tmp_path / "run" / "metrics.jsonl")
    assert [each["step"] for each in records if each["kind"] == "train"] == list(range(1, 13))
    assert [each["step"] for each in discarded if each["kind"] == "train"] == [7, 8, SPIKE]
    (rollback,) = rollbacks
    assert (rollback["step"], rollback["to"], rollback["count"]) == (SPIKE, TO, 1)
    reason = "a loss spike" if kind == SPIKED else "the gradient of norm.weight is not finite"
    assert rollback["reason"].startswith(reason)
    assert any(f"step {SPIKE}: rolled back to step {TO}: {reason}" in note for note in notes)
    assert {each.get("data_offset") for each in records if each["step"] > TO and "loss" in each} == {LEFT_OUT}
    assert not any("data_offset" in each for each in (*discarded, *records[:TO]))
    assert (summary["ended"], summary["steps"]) == ("finished", 12)
    assert (summary["rollbacks"], summary["rolled_back_steps"]) == (1, LEFT_OUT)
    assert (summary["skipped_steps"], summary["spikes"]) == (0, 0)
    times = [each["step_seconds"] for each in (*records, *discarded) if each["kind"] == "train"]
    assert summary["seconds"] == pytest.approx(sum(times))


def test_the_steps_after_a_rollback_are_those_of_a_run_without_the_data(
    train, rolling, data, tmp_path, monkeypatch
):
    with monkeypatch.context() as context:
        inject(context.setattr, SPIKED, of_data)
        train(keep_every=1)
    trainer = Trainer(with_vocabulary(rolling, data), data, torch.device("cpu"))
    trainer.resume(open_checkpoint(tmp_path / "run" / "checkpoints" / f"step_{TO}"))
    trainer.rollbacks = Rollbacks()
    batch, left_out = trainer.stream.batch, LEFT_OUT * rolling.train.samples_per_step
    monkeypatch.setattr(trainer.stream, "batch", lambda first, count: batch(first + left_out, count))
    for _ in range(TO, 12):
        trainer.check(trainer.run_step())
    stored = open_checkpoint(tmp_path / "run" / "checkpoints" / "step_12")
    saved = trainer.ranks.load(stored, "model", trainer.tensors()["model"])
    assert all(master.equal(saved[name]) for name, master in trainer.masters.items())


@pytest.mark.parametrize("stops", [(TO,), (TO + 1,), (SPIKE - 1,), (2, SPIKE - 2, 11)])
@KINDS
def test_a_run_that_is_stopped_has_the_bits_of_a_whole_one(train, whole, tmp_path, kind, stops):
    """A checkpoint that a signal caused is nearer, and no run rolls back to it."""
    expected = whole(kind)
    for after in (*stops, None):
        train("cut", after)
    assert content(tmp_path / "cut") == expected


@KINDS
def test_saves_in_the_background_change_no_rollback(train, whole, tmp_path, kind):
    expected = whole(kind)
    train("background", background_saves=True)
    assert content(tmp_path / "background") == expected


def killed_at(name, call):
    """Replaces a function of the keeper: the process dies before its `call`-th call, or after it."""
    original, calls = getattr(keeper, name), iter(range(9))

    def function(*given):
        number = next(calls)
        if call == (number, "before"):
            raise Killed
        original(*given)
        if call == (number, "after"):
            raise Killed

    return function


@pytest.mark.parametrize(
    ("name", "call"), [("remove_after", (0, "before")), ("amend", (0, "before")), ("amend", (0, "after"))]
)
@KINDS
def test_a_run_killed_within_a_rollback_has_the_bits_of_a_whole_one(
    train, whole, tmp_path, monkeypatch, kind, name, call
):
    expected = whole(kind)
    with monkeypatch.context() as context:
        context.setattr(keeper, name, killed_at(name, call))
        with pytest.raises(Killed):
            train("killed")
    train("killed")
    assert content(tmp_path / "killed") == expected


@pytest.mark.parametrize(("step", "time"), [(TO, 1), (SPIKE, 1), (TO + 1, 2), (SPIKE, 2), (11, 1)])
def test_a_run_killed_around_a_rollback_has_the_bits_of_a_whole_one(
    train, whole, tmp_path, monkeypatch, step, time
):
    """time: the first or second time that a step is trained."""
    expected = whole(SPIKED)
    append, seen = MetricsFile.append, []

    def killing(self, record):
        append(self, record)
        seen.append((record["kind"], record["step"]))
        if seen.count(("train", step)) == time:
            raise Killed

    with monkeypatch.context() as context:
        context.setattr(MetricsFile, "append", killing)
        with pytest.raises(Killed):
            train("killed")
    train("killed")
    assert content(tmp_path / "killed") == expected


def test_a_run_may_roll_back_again_to_the_same_checkpoint(train, tmp_path, monkeypatch):
    """The data of step 11, too, are bad: step 8 reads them after the first rollback."""
    inject(monkeypatch.setattr, SPIKED, lambda data, step: data in (SPIKE, 11))
    summary, _ = train()
    rollbacks = read_history(tmp_path / "run" / "metrics.jsonl").rollbacks
    assert [(each["step"], each["to"], each["data_offset"]) for each in rollbacks] == [(9, 6, 3), (8, 6, 5)]
    assert (summary["ended"], summary["rollbacks"]) == ("finished", 2)


@KINDS
def test_a_run_rolls_back_to_its_start_if_nothing_is_older(train, tmp_path, monkeypatch, kind):
    inject(monkeypatch.setattr, kind, of_data)
    train(rollback_steps=100)
    (rollback,) = read_history(tmp_path / "run" / "metrics.jsonl").rollbacks
    assert (rollback["step"], rollback["to"]) == (SPIKE, 0)


@pytest.mark.parametrize(
    ("kind", "error", "ended"), [(SPIKED, RollbackError, "failed"), (INFINITE, NonFiniteError, "non-finite")]
)
def test_a_run_that_has_rolled_back_often_enough_ends_with_an_error(
    train, tmp_path, monkeypatch, kind, error, ended
):
    inject(monkeypatch.setattr, kind, lambda data, step: step == SPIKE)
    for limit in (2, 3):  # and so it does when its command is rerun with a higher limit, once more
        with pytest.raises(
            error, match=rf"step {SPIKE}: .* rolled back {limit} times, as often as train.max"
        ):
            train(max_rollbacks=limit)
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert (summary["ended"], summary["rollbacks"]) == (ended, limit)
    assert checkpoints(tmp_path / "run" / "checkpoints")


def test_a_validation_loss_that_is_not_finite_rolls_back(train, tmp_path, monkeypatch):
    validate, calls = Trainer.validate, iter(range(9))

    def nan_at_the_second(self):
        found = validate(self)
        if next(calls) != 1:
            return found
        return {name: Loss(math.nan, loss.tokens, 1) for name, loss in found.items()}

    monkeypatch.setattr(Trainer, "validate", nan_at_the_second)
    monkeypatch.setattr(Trainer, "non_finite_cause", lambda self: "values are not finite in the loss itself")
    summary, _ = train()
    (rollback,) = read_history(tmp_path / "run" / "metrics.jsonl").rollbacks
    assert (rollback["step"], rollback["to"], summary["ended"]) == (8, 6, "finished")
    assert rollback["reason"].startswith("the validation loss is nan")


def test_another_run_starts_from_a_checkpoint_after_a_rollback(
    train, rolling, data_cache, tmp_path, monkeypatch
):
    inject(monkeypatch.setattr, SPIKED, of_data)
    train(after=11)
    run(rolling, tmp_path / "fork", stop=StopRequest(), data_cache=data_cache, start_from=tmp_path / "run")
    train()
    forked, whole = content(tmp_path / "fork"), content(tmp_path / "run")
    assert forked[:3] == whole[:3]
    assert (forked[3]["rollbacks"], whole[3]["rollbacks"]) == (
        {"count": 0, "data_offset": LEFT_OUT},
        {"count": 1, "data_offset": LEFT_OUT},
    )


def test_sinks_begin_again_where_a_run_rolls_back_to(train, monkeypatch):
    events = []

    class Recorder:
        def begin(self, run):
            events.append(("begin", run.step))

        def write(self, step, metrics):
            events.append(("write", step))

        def end(self, ended):
            events.append(("end", ended))

    monkeypatch.setitem(sinks._FACTORIES, "recorder", Recorder)
    inject(monkeypatch.setattr, SPIKED, of_data)
    train(sinks=("recorder",), validation_interval=100)
    steps = [("write", step) for step in range(1, SPIKE + 1)]
    again = [("write", step) for step in (*range(TO + 1, 13), 12)]  # the last is a validation
    assert events == [("begin", 0), *steps, ("begin", TO), *again, ("end", "finished")]


def test_the_page_of_a_run_names_its_rollbacks(train, tmp_path, monkeypatch):
    inject(monkeypatch.setattr, SPIKED, of_data)
    train()
    page = write_run_report(tmp_path / "run").read_text()
    assert f"Rolled back once: step {SPIKE} to {TO}" in page


@pytest.mark.parametrize(
    ("bad", "target"),
    [(1, 0), (105, 0), (109, 0), (110, 10), (119, 10), (120, 20), (200, 100)],
)
def test_the_target_is_the_newest_checkpoint_of_the_interval_that_is_old_enough(bad, target):
    saved = [step for step in range(bad) if step % 10 == 0 or step % 7 == 0]  # the latter by a clock
    assert RollbackPolicy(100, 10, 5).target(saved, bad) == target


def test_a_run_started_from_another_rolls_back_to_where_it_started():
    policy = RollbackPolicy(steps=100, interval=10, limit=5, start_step=33)
    assert policy.target([33, 40, 50], 60) == 33
    assert policy.target([33, 40, 50], 140) == 40
    assert policy.target([35], 140) is None


@pytest.mark.parametrize(("steps", "interval"), [(1, 1), (2, 3), (3, 2), (100, 70), (5, 5)])
def test_rotation_leaves_what_a_rollback_needs_and_no_more_than_was_checked(tmp_path, steps, interval):
    policy = RollbackPolicy(steps, interval, limit=5)

    def write(folder, step, files, state):
        (folder / f"step_{step}").mkdir(parents=True)

    kept = CheckpointKeeper(tmp_path, 1, None, None, write, rollback=policy)
    kept.save(0, {}, {})
    most = 0
    for step in range(1, 4 * max(steps, interval)):
        expected = max(x for x in range(0, step, interval) if x <= max(step - steps, 0))
        assert policy.target(kept.saved(), step) == expected
        kept.proved(step)
        if step % interval == 0:
            kept.save(step, {}, {})
        most = max(most, len(kept.saved()))
    assert most <= policy.most + 1


def test_the_disk_is_checked_for_the_checkpoints_of_rollbacks(tmp_path):
    policy = RollbackPolicy(steps=100, interval=10, limit=5)
    with pytest.raises(OSError, match=r"13 checkpoints .* \(for rollbacks"):
        require_space(tmp_path / "checkpoints", 2, 1 << 50, policy)


@pytest.mark.parametrize("policy", ["spike", "non_finite"])
def test_rolling_back_needs_checkpoints(config, policy):
    with pytest.raises(ValueError, match="checkpoint_interval must be a number of steps if"):
        override(config, {f"train.{policy}": "rollback", "train.checkpoint_interval": None})


def test_data_past_the_end_of_a_run_are_of_its_last_phase_and_within_max_epochs(data):
    settings = {"total_samples": 12, "seq_len": 32, "seed": 0, "batch_size": 4}
    weights = {"notes": 0.5, "letters": 0.5}
    phases = [Phase(until=0.5, weights={"notes": 1.0, "letters": 0.0}), Phase(until=1.0, weights=weights)]
    stream, other = (data.stream(phases, **settings) for _ in range(2))
    with pytest.raises(ValueError, match=r"samples must be in \[0, 12\)"):
        stream.batch(12, 4)
    stream.read_beyond(8)
    assert (stream.batch(0, 12) == other.batch(0, 12)).all()
    sources, cursors = stream.blend.locate(torch.arange(12, 20).numpy())
    assert sorted(sources.tolist()) == [0] * 4 + [1] * 4
    assert sorted(cursors[sources == 1].tolist()) == list(range(3, 7))
    assert stream.batch(12, 8).shape == (8, 33)
    limited = data.stream(phases, **settings, max_epochs=0.5)
    with pytest.raises(ValueError, match="exceeds max_epochs"):
        limited.read_beyond(100_000)


def test_a_length_may_change_after_a_run_has_read_past_its_end():
    def plan(*ends):
        firsts = (0, *ends[:-1])
        phases = [
            {"first_sample": a, "end_sample": b, "slots": {"a": 1}} for a, b in zip(firsts, ends, strict=True)
        ]
        return {"phases": phases}

    check_phases(plan(48), plan(96), 60, "run")
    check_phases(plan(24, 48), plan(24, 48), 60, "run")
    with pytest.raises(ValueError, match="the length cannot change"):
        check_phases(plan(24, 48), plan(48, 96), 40, "run")


def test_a_setback_counts_the_data_of_all_steps_since_the_target():
    assert Rollbacks(1, 3).after(RollbackCause(20, "", True), 12) == Rollbacks(2, 11)


def test_data_inspect_shows_the_samples_that_a_step_read_in_the_end(train, tmp_path, monkeypatch, capsys):
    inject(monkeypatch.setattr, SPIKED, of_data)
    train()
    for step, offset in ((TO - 1, 0), (TO, LEFT_OUT), (11, LEFT_OUT)):
        capsys.readouterr()
        assert main(["data", "inspect", str(tmp_path / "run"), "--step", str(step), "--json"]) == 0
        samples = [each["sample"] for each in json.loads(capsys.readouterr().out)["step"]]
        assert samples == [4 * (step + offset) + i for i in range(4)]
