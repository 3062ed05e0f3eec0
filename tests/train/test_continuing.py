"""A run continues with another length, from text that moved, or in a new folder from a checkpoint."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from fourbits.data.config import DataConfig
from fourbits.recipe.presets import get_recipe
from fourbits.train.checkpoint import checkpoints
from fourbits.train.metrics import MEASURED, read_metrics
from fourbits.train.run import run
from fourbits.train.session import Session
from support.stopper import Stopper


@pytest.fixture(scope="module")
def train(config, data_cache):
    def start(out, *, after=None, start_from=None, data=None, recipe=None, optim=(), model=(), **settings):
        changed = replace(
            config,
            train=replace(config.train, **settings),
            optim=replace(config.optim, **dict(optim)),
            model=replace(config.model, **dict(model)),
            recipe=get_recipe(recipe) if recipe else config.recipe,
            data=data or config.data,
        )
        listener = Stopper(after)
        cache = data_cache if data is None else out.parent / "data"
        run(changed, out, listener=listener, stop=listener.stop, data_cache=cache, start_from=start_from)
        return listener.notes

    return start


@pytest.fixture(scope="module")
def finished(train, tmp_path_factory):
    """12 steps with checkpoints of steps 5, 10 and 12; the learning rate decays in the last two."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(out, keep_checkpoints=3)
    return out


def weights(out):
    return {
        file.name: file.read_bytes() for file in checkpoints(out / "checkpoints")[-1].glob("*.safetensors")
    }


def comparable(out):
    return [{k: v for k, v in r.items() if k not in MEASURED} for r in read_metrics(out / "metrics.jsonl")]


def test_a_longer_run_has_the_bits_of_one_that_was_that_long_from_the_start(train, tmp_path):
    train(tmp_path / "longer", after=7)
    notes = train(tmp_path / "longer", steps=20)
    assert (
        "12 steps become 20: warmup to step 1, lr 0.01 to step 16, linear decay to 0.0001 at step 20" in notes
    )
    train(tmp_path / "long", steps=20)
    assert weights(tmp_path / "longer") == weights(tmp_path / "long")
    assert comparable(tmp_path / "longer") == comparable(tmp_path / "long")


def test_a_longer_run_keeps_its_warmup_and_is_resumed_by_the_same_settings(train, tmp_path):
    """A share of 0.25 is 3 of 12 steps, and would be 10 of 40."""
    early = {"optim": {"warmup_share": 0.25}}
    train(tmp_path, after=5, **early)
    train(tmp_path, after=8, steps=40, **early)
    train(tmp_path, after=9, steps=40, **early)
    rates = [record["lr"] for record in read_metrics(tmp_path / "metrics.jsonl") if record["kind"] == "train"]
    assert rates == pytest.approx([0.01 / 3, 0.02 / 3] + 7 * [0.01])


def test_a_run_that_decays_without_end_may_not_become_longer_but_be_started_from(finished, train, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    with pytest.raises(
        ValueError,
        match=r"from 12 to 20 at step 12: .* differs from step 11 on.*, or --from .*/step_10, before that\.",
    ):
        train(out, steps=20)
    assert comparable(out) == comparable(finished)
    train(tmp_path / "new", steps=20, start_from=out / "checkpoints" / "step_10")
    rates = [r["lr"] for r in read_metrics(tmp_path / "new" / "metrics.jsonl") if r["kind"] == "train"]
    assert rates[9:16] == [0.01] * 7
    for step in checkpoints(out / "checkpoints")[:-1]:
        shutil.rmtree(step)
    with pytest.raises(ValueError, match=rf"--from {re.escape(str(out))} --out NEW --train.steps 20\.$"):
        train(out, steps=20)


def test_without_decay_a_finished_run_may_become_longer(train, tmp_path):
    constant = {"optim": {"decay_share": 0.0, "warmup_share": 0.0}}
    train(tmp_path / "longer", steps=4, **constant)
    train(tmp_path / "longer", steps=6, **constant)
    train(tmp_path / "long", steps=6, **constant)
    assert weights(tmp_path / "longer") == weights(tmp_path / "long")


def test_a_run_from_a_checkpoint_with_the_same_settings_has_the_same_bits(finished, train, tmp_path):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    out = tmp_path / "new"
    train(out, start_from=finished / "checkpoints" / "step_5")
    assert weights(out) == weights(finished)
    assert comparable(out) == comparable(finished)
    (entry,) = json.loads((out / "manifest.json").read_text())["ancestry"]
    assert (entry["run"], entry["step"], entry["changed"]) == (str(finished), 5, ["train.keep_checkpoints"])
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "change", [{"optim": {"lr": 1e-3}}, {"recipe": "mxfp4"}, {"steps": 9}], ids=["lr", "recipe", "steps"]
)
def test_a_run_from_a_checkpoint_has_its_steps_then_its_own_and_resumes(finished, train, tmp_path, change):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    start = finished / "checkpoints" / "step_5"
    train(whole, start_from=start, **change)
    train(parts, start_from=start, after=6, **change)
    train(parts, start_from=start, after=7, **change)
    train(parts, **change)  # the folder is complete without the run that it comes from
    assert weights(parts) == weights(whole) != weights(finished)
    assert comparable(parts) == comparable(whole)
    shared = [record for record in comparable(finished) if record["step"] <= 5]
    assert comparable(whole)[: len(shared)] == shared
    assert len(json.loads((parts / "manifest.json").read_text())["ancestry"]) == 1


def test_a_run_from_a_run_from_a_run_lists_both(finished, train, tmp_path):
    train(tmp_path / "child", start_from=finished / "checkpoints" / "step_5", steps=7)
    train(tmp_path / "grandchild", start_from=tmp_path / "child", steps=9)
    ancestry = json.loads((tmp_path / "grandchild" / "manifest.json").read_text())["ancestry"]
    assert [(entry["run"], entry["step"]) for entry in ancestry] == [
        (str(finished), 5),
        (str(tmp_path / "child"), 7),
    ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": {"d_ffn": 128}}, "model.d_ffn must be that of the run it comes from"),
        ({"optim": {"masters": "bf16-sr"}}, "optim.masters must be"),
        ({"steps": 12}, "train.steps must be above 12"),
        ({"steps": 20, "micro_batch_size": 4}, "a step must have 128 tokens as before, got 256"),
    ],
    ids=["model", "masters", "steps", "batch"],
)
def test_what_cannot_start_from_a_checkpoint_is_refused_and_leaves_no_folder(
    finished, train, tmp_path, change, text
):
    with pytest.raises(ValueError, match=text):
        train(tmp_path / "new", start_from=finished, **change)
    assert not (tmp_path / "new").exists()


def test_a_folder_with_another_run_is_not_started_in(finished, train, tmp_path):
    train(tmp_path / "other", steps=1)
    for out in (tmp_path / "other", finished):
        with pytest.raises(ValueError, match=r"holds another run\. Choose another --out"):
            train(out, steps=20, start_from=finished)


def test_a_start_that_was_cut_short_is_not_trained_from_the_beginning(finished, train, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Session, "_save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, start_from=finished / "checkpoints" / "step_5")
    with pytest.raises(ValueError, match=r"Rerun its command, with --from\."):
        train(tmp_path)
    train(tmp_path, start_from=finished / "checkpoints" / "step_5")
    assert weights(tmp_path) == weights(finished)


@pytest.fixture
def text(tmp_path):
    def write(folder, words):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "words.txt"
        path.write_text(words * 2000, encoding="utf-8")
        return DataConfig(paths=(str(path),), vocab_size=384)

    return write


def test_text_that_moved_is_read_there_and_other_text_is_not(train, text, tmp_path):
    here, there, other = text("a", "one two three "), text("b", "one two three "), text("c", "four five six ")
    out = tmp_path / "run"
    train(out, after=2, data=here)
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(ValueError, match=r"words\.txt.*If the run's text has moved, pass --data\.paths"):
        train(out, data=here)
    with pytest.raises(ValueError, match="read different text"):
        train(out, data=other)
    assert "continuing from" in " ".join(train(out, after=3, data=there))
    (out / "manifest.json").unlink()
    with pytest.raises(ValueError, match="read different text"):
        train(out, data=other)


def test_new_text_needs_the_old_tokenizer(train, text, tmp_path):
    train(tmp_path / "run", steps=2, data=text("a", "one two three "))
    other = text("b", "four five six ")
    with pytest.raises(ValueError, match=r"Pass --data\.tokenizer .*tokenizer\.json"):
        train(tmp_path / "new", steps=4, data=other, start_from=tmp_path / "run")
    same = replace(other, tokenizer=str(tmp_path / "run" / "tokenizer.json"))
    train(tmp_path / "new", steps=4, data=same, start_from=tmp_path / "run")
    assert [r["step"] for r in comparable(tmp_path / "new") if r["kind"] == "train"] == [1, 2, 3, 4]
