"""A whole run: its folder, how it continues, and how it ends."""

import json
import resource
import signal
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from fourbits.data.config import DataConfig
from fourbits.settings import load_yaml, to_dict
from fourbits.train.checkpoint import checkpoints
from fourbits.train.config import config_from_mapping
from fourbits.train.listener import RunListener
from fourbits.train.metrics import MEASURED, read_metrics
from fourbits.train.non_finite import NonFiniteError
from fourbits.train.run import run
from fourbits.train.stop import StopRequest


class Recorder(RunListener):
    """Records notes and steps, and calls a function after one step."""

    def __init__(self, after=None, act=lambda: None):
        self.after, self.act, self.notes, self.steps = after, act, [], []

    def note(self, text):
        self.notes.append(text)

    def step(self, record):
        self.steps.append(record["step"])
        if record["step"] == self.after:
            self.act()


@pytest.fixture
def train(config, data_cache):
    def start(out, listener=None, stop=None, changed=config):
        return run(changed, out, listener=listener, stop=stop or StopRequest(), data_cache=data_cache)

    return start


@pytest.fixture
def interrupted(train, tmp_path):
    """A run that was asked to stop after a number of steps."""

    def start(steps, name="run"):
        stop = StopRequest()
        recorder = Recorder(steps, lambda: setattr(stop, "signal", signal.SIGINT))
        train(tmp_path / name, recorder, stop)
        return tmp_path / name

    return start


@pytest.fixture(scope="module")
def uninterrupted(config, data_cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    run(config, out, stop=StopRequest(), data_cache=data_cache)
    return out


def comparable(out):
    return [
        {key: value for key, value in record.items() if key not in MEASURED}
        for record in read_metrics(out / "metrics.jsonl")
    ]


def weights(out):
    last = checkpoints(out / "checkpoints")[-1]
    return {file.name: file.read_bytes() for file in last.glob("*.safetensors")}


def test_a_run_folder_has_all_its_parts(uninterrupted, config):
    assert config_from_mapping(load_yaml(uninterrupted / "config.yaml")) == config
    manifest = json.loads((uninterrupted / "manifest.json").read_text())
    assert manifest["recipe"]["digest"] == config.recipe.digest
    assert manifest["backend"]["reason"]
    assert {row["name"] for row in manifest["precision"]["linears"]} >= {"blocks.0.mixer.in_proj", "head"}
    assert all(row["reason"] for row in manifest["precision"]["linears"])
    assert set(manifest["hashes"]) == {"initial_weights", "text", "data_order", "validation"}
    summary = json.loads((uninterrupted / "summary.json").read_text())
    assert (summary["ended"], summary["steps"], summary["tokens"]) == ("finished", 12, 12 * 128)
    assert [path.name for path in checkpoints(uninterrupted / "checkpoints")] == ["step_10", "step_12"]


def test_metrics_have_a_line_per_step_and_per_validation(uninterrupted):
    records = read_metrics(uninterrupted / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert [record["tokens"] for record in steps] == [128 * step for step in range(1, 13)]
    keys = {"loss", "lr", "grad_norm", "mfu", "memory_bytes"}
    keys |= {"tokens_per_second", "step_seconds", "data_seconds"}
    assert all(keys <= record.keys() for record in steps)
    assert all(record["mfu"] is None for record in steps), "no peak is known for a CPU"
    validations = [record for record in records if record["kind"] == "validation"]
    assert [record["step"] for record in validations] == [4, 8, 12]
    assert all(record["val_tokens"] == 2 * 3 * 32 for record in validations)
    total = validations[-1]["val_notes"] + validations[-1]["val_letters"]
    assert validations[-1]["val_loss"] == pytest.approx(total / 2, rel=1e-12)


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_a_stopped_run_continues_to_the_bits_of_an_uninterrupted_one(
    interrupted, train, uninterrupted, steps
):
    out = interrupted(steps)
    assert json.loads((out / "summary.json").read_text())["ended"] == "interrupted"
    assert [record["step"] for record in comparable(out) if record["kind"] == "train"][-1] == steps
    recorder = Recorder()
    assert train(out, recorder)["ended"] == "finished"
    assert recorder.steps == list(range(steps + 1, 13))
    assert weights(out) == weights(uninterrupted)
    assert comparable(out) == comparable(uninterrupted)


def test_metrics_after_the_checkpoint_are_removed_and_written_again(interrupted, train, uninterrupted):
    out = interrupted(7)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 8, "loss": 0.0}\n{"kind": "tr')
    train(out)
    assert comparable(out) == comparable(uninterrupted)


def test_a_finished_run_is_unchanged_and_says_so(uninterrupted, train):
    before = {path: path.read_bytes() for path in uninterrupted.rglob("*") if path.is_file()}
    recorder = Recorder()
    assert train(uninterrupted, recorder)["ended"] == "finished"
    assert recorder.steps == []
    assert "is finished (12 steps); nothing to do" in recorder.notes[0]
    assert {path: path.read_bytes() for path in uninterrupted.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("model", {"d_model": 64}, "model.d_model"),
        ("optim", {"lr": 1.0}, "optim.lr"),
        ("train", {"seed": 1}, "train.seed"),
    ],
)
def test_another_run_may_not_continue_here(interrupted, train, config, part, change, named):
    out = interrupted(2)
    other = replace(config, **{part: replace(getattr(config, part), **change)})
    with pytest.raises(ValueError, match=f"holds a run with a different {named}.*: fourbits train --from"):
        train(out, changed=other)


def test_settings_that_change_no_bit_may_change_when_a_run_continues(
    interrupted, train, config, uninterrupted
):
    out = interrupted(2)
    free = {"checkpoint_interval": 3, "keep_checkpoints": 1, "activation_checkpointing": "full"}
    train(
        out,
        changed=replace(config, train=replace(config.train, backend="emulated", cuda_graph=False, **free)),
    )
    assert weights(out) == weights(uninterrupted)
    assert len(checkpoints(out / "checkpoints")) == 1


def test_a_checkpoint_of_another_shape_is_an_error_that_names_the_tensor(
    interrupted, train, tmp_path, config, data_cache
):
    small = interrupted(2)
    wide = replace(config, model=replace(config.model, d_ffn=128), train=replace(config.train, steps=2))
    train(tmp_path / "wide", changed=wide)
    (small / "checkpoints" / "step_2").rename(small / "step_2")
    (tmp_path / "wide" / "checkpoints" / "step_2").rename(small / "checkpoints" / "step_2")
    with pytest.raises(
        ValueError, match=r"belongs to another model: 'blocks.1.mixer.up_proj.weight' is .*\[128, 32\]"
    ):
        train(small)


def test_a_truncated_checkpoint_stops_the_run_with_its_name(interrupted, train):
    out = interrupted(7)
    file = out / "checkpoints" / "step_7" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"optimizer.safetensors: truncated .* continue from step_5"):
        train(out)


def test_other_text_under_the_same_name_may_not_continue(config, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one two three four " * 2000)
    changed = replace(config, data=DataConfig(paths=(str(text),), vocab_size=384))
    stop = StopRequest()
    run(
        changed,
        tmp_path / "run",
        listener=Recorder(2, lambda: setattr(stop, "signal", signal.SIGINT)),
        stop=stop,
    )
    text.write_text("five six seven eight " * 2000)
    with pytest.raises(ValueError, match="read different text"):
        run(changed, tmp_path / "run", stop=StopRequest())


def test_settings_that_never_trained_a_step_do_not_bind_a_folder(config, train, tmp_path):
    impossible = replace(config, data=replace(config.data, max_epochs=1e-6))
    with pytest.raises(ValueError, match="max_epochs"):
        train(tmp_path / "run", changed=impossible)
    assert train(tmp_path / "run")["ended"] == "finished"


def test_two_processes_may_not_train_in_one_folder(train, tmp_path):
    out = tmp_path / "run"
    second = []

    def intrude():
        with pytest.raises(ValueError, match="another process is training in this folder"):
            train(out)
        second.append(True)

    train(out, Recorder(1, intrude))
    assert second == [True]


def test_a_run_that_ends_in_nan_says_so_and_keeps_its_checkpoints(config, train, tmp_path):
    wild = replace(config, optim=replace(config.optim, lr=1e30, grad_clip=None, warmup_share=0.0))
    with pytest.raises(NonFiniteError, match=r"step 2.*train again in another --out"):
        train(tmp_path / "run", changed=wild)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ended"] == "non-finite"
    assert "step 2" in summary["reason"]
    assert summary["steps"] == 1
    assert checkpoints(tmp_path / "run" / "checkpoints") == []


def test_a_disk_that_fills_up_costs_the_steps_since_the_last_checkpoint_and_nothing_else(
    train, tmp_path, uninterrupted
):
    """The size limit of a process stands for the disk: metrics fit into it, a checkpoint does not."""
    out, (soft, hard) = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    full = Recorder(6, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard)))
    try:
        with pytest.raises(OSError, match="step 10 was not saved, earlier checkpoints are intact"):
            train(out, full)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert json.loads((out / "summary.json").read_text())["ended"] == "failed"
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_5"]
    train(out)
    assert weights(out) == weights(uninterrupted)
    assert comparable(out) == comparable(uninterrupted)


def test_weights_on_disk_are_fp32_masters_under_the_names_of_the_model(uninterrupted):
    saved = load_file(checkpoints(uninterrupted / "checkpoints")[-1] / "model.safetensors")
    assert {str(tensor.dtype) for tensor in saved.values()} == {"torch.float32"}
    assert {"embed.weight", "head.weight", "norm.weight", "blocks.0.mixer.A_log"} <= saved.keys()


def test_one_process_may_run_several_recipes_one_after_another(config, train, tmp_path):
    short = replace(config, train=replace(config.train, steps=2))
    for recipe in ("bf16", "nvfp4"):
        changed = config_from_mapping(to_dict(short), {"recipe": recipe})
        assert train(tmp_path / recipe, changed=changed)["ended"] == "finished"
    manifests = [json.loads((tmp_path / r / "manifest.json").read_text()) for r in ("bf16", "nvfp4")]
    assert manifests[0]["hashes"] == manifests[1]["hashes"]
    assert manifests[0]["recipe"] != manifests[1]["recipe"]


def test_text_that_no_run_can_use_leaves_no_folder(config, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(ValueError, match=r"empty\.txt"):
        run(replace(config, data=replace(config.data, paths=(str(empty),))), tmp_path / "out")
    assert not (tmp_path / "out").exists()
