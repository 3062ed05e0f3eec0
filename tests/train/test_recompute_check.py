"""The check for silent corruption: digests, which rank is at fault, and that a run keeps its bits."""

import json
from dataclasses import replace

import pytest
import torch

from fourbits.cli.main import main
from fourbits.device import probe
from fourbits.quant.request import ROLES
from fourbits.recipe.presets import get_recipe
from fourbits.settings import override
from fourbits.train import digests
from fourbits.train.checkpoint import checkpoints
from fourbits.train.corruption import CorruptionError, Mismatch, find_mismatch
from fourbits.train.digests import digest
from fourbits.train.metrics import MEASURED, read_metrics
from fourbits.train.opening import with_vocabulary
from fourbits.train.recompute_check import require_repeatable
from fourbits.train.run import run
from fourbits.train.run_folder import read_json
from fourbits.train.stop import StopRequest
from fourbits.train.trainer import Trainer
from support.corruption import fault_in_backward, fault_in_forward, with_faults
from support.stopper import Stopper
from support.torchrun import written

INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
TRACKED = {
    **{f"{role}.amax_policy": "history" for role in ROLES[:6]},
    "fprop.rhs.adaptive": "block",
    "dgrad.rhs.adaptive": "block",
}


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_digest_changes_with_every_single_bit(dtype):
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = torch.iinfo(INTEGERS[dtype]).bits
    before = int(digest(x))
    for element in range(x.numel()):
        for bit in range(bits):
            flipped = x.clone()
            flat = flipped.view(-1).view(INTEGERS[dtype])
            flat[element] ^= -(1 << bit) if bit == bits - 1 else 1 << bit
            assert int(digest(flipped)) != before, (element, bit)


def test_a_digest_is_the_sum_that_its_definition_says_in_any_number_of_parts(monkeypatch):
    x = torch.randn(7, 9, generator=torch.Generator().manual_seed(0)).t()
    bits = x.contiguous().view(-1).view(torch.int32).tolist()
    expected = sum((2 * i + 1) * b for i, b in enumerate(bits)) % (1 << 64)
    for chunk in (1, 10, 63, 1 << 22):
        monkeypatch.setattr(digests, "_CHUNK", chunk)
        assert int(digest(x)) % (1 << 64) == expected


A, B, C = (0, 1, 2), (0, 5, 2), (9, 5, 7)


@pytest.mark.parametrize(
    ("rows", "tensor", "devices_differ", "expected"),
    [
        ([(A, A)], 1, False, None),
        ([(A, B)], 1, False, ((0,), "first in the gradient of w")),
        ([(A, C)], 1, False, ((0,), "in the loss")),
        ([(A, A), (A, A)], 1, False, None),
        ([(A, A), (A, B)], 1, False, ((1,), "first in the gradient of w")),
        ([(B, B), (A, C)], 1, False, ((1,), "in the loss")),
        ([(A, A), (B, B)], 1, False, ((), "first in the gradient of w")),
        ([(A, A), (B, B)], 1, True, None),
        ([(A, A), (B, C)], 1, True, ((1,), "in the loss")),
        ([(A, A), (C, C), (A, A)], 1, False, ((1,), "in the loss")),
        ([(A, A), (A, A), (B, B), (C, C)], 1, False, ((), "in the loss")),
        # pairs that share layers compute different parts: 0 and 2, 1 and 3, 5 and 7 ... are alike
        ([(A, A), (B, B), (A, A), (B, B)], 2, False, None),
        ([(A, A), (B, B), (A, A), (B, B), (A, A), (C, C)], 2, False, ((5,), "in the loss")),
    ],
)
def test_a_rank_is_at_fault_if_it_contradicts_itself_or_the_majority(rows, tensor, devices_differ, expected):
    found = find_mismatch(torch.tensor(rows), tensor, devices_differ, ["w", "last"])
    assert found == (None if expected is None else Mismatch(*expected))


@pytest.mark.parametrize(
    ("kind", "deterministic", "interval", "match"),
    [
        ("cpu", False, 4, None),
        ("cuda", True, 4, None),
        ("rocm", True, 4, None),
        ("cuda", False, None, None),
        (
            "cuda",
            False,
            4,
            r"train.deterministic must be true on a GPU, got false.*to true, or .* null",
        ),
        ("mps", True, 4, "must be null on mps"),
    ],
)
def test_a_gpu_needs_deterministic_operations(config, kind, deterministic, interval, match):
    device = replace(probe("cpu"), kind=kind)
    train = replace(config.train, deterministic=deterministic, recompute_check_interval=interval)
    if match is None:
        require_repeatable(train, device)
        return
    with pytest.raises(ValueError, match=f"^train.recompute_check_interval: .*{match}"):
        require_repeatable(train, device)


def checked(config, **changes):
    return replace(config, train=replace(config.train, **{"recompute_check_interval": 2, **changes}))


def content(out):
    """The files of the newest checkpoint, and all that metrics.jsonl has of steps and validations."""
    newest = checkpoints(out / "checkpoints")[-1]
    records = [{k: v for k, v in r.items() if k not in MEASURED} for r in read_metrics(out / "metrics.jsonl")]
    files = {file.name: file.read_bytes() for file in newest.glob("*.safetensors")}
    return files, [r for r in records if r["kind"] != "recompute_check"]


def checks(out):
    return [r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "recompute_check"]


@pytest.mark.parametrize("recipe", ["nvfp4", "tracked", "bf16"])
def test_a_check_changes_no_bit_of_a_run_and_finds_nothing_where_nothing_is(
    config, data_cache, tmp_path, recipe
):
    """Nor do the statistics that a recipe keeps notice the computations of a check."""
    made = override(get_recipe("nvfp4"), TRACKED) if recipe == "tracked" else get_recipe(recipe)
    config = replace(config, recipe=made)
    run(config, tmp_path / "without", stop=StopRequest(), data_cache=data_cache)
    summary = run(checked(config), tmp_path / "with", stop=StopRequest(), data_cache=data_cache)
    assert content(tmp_path / "with") == content(tmp_path / "without")
    assert (summary["recompute_checks"], summary["recompute_mismatches"]) == (6, 0)
    assert [(r["step"], r["equal"]) for r in checks(tmp_path / "with")] == [
        (n, True) for n in range(1, 12, 2)
    ]
    assert "different bits" not in (tmp_path / "with" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("changes", "recomputed"), [({"masters": "bf16-sr"}, "none"), ({}, "full")], ids=["bf16", "recomputed"]
)
def test_every_gradient_is_in_the_digests(config, data, changes, recomputed):
    config = replace(config, optim=replace(config.optim, **changes))
    config = with_vocabulary(checked(config, activation_checkpointing=recomputed), data)
    trainer = Trainer(config, data, torch.device("cpu"))
    found = trainer.digests()
    assert len(found) == 1 + len(trainer.masters)
    assert found.count_nonzero() == len(found)
    assert found.equal(trainer.digests())
    assert all(master.grad is None for master in trainer.masters.values())


def test_a_flipped_bit_ends_the_run_before_its_step(config, data_cache, tmp_path, monkeypatch):
    """The third check, before step 6, has computations 5 and 6."""
    monkeypatch.setattr(Trainer, "digests", with_faults(0, {6}))
    with pytest.raises(CorruptionError) as error:
        run(checked(config), tmp_path, stop=StopRequest(), data_cache=data_cache)
    text = str(error.value)
    assert text.startswith("step 6: a micro-batch that was computed twice has different bits, in the loss.")
    assert "Bits were last equal at step 4" in text
    summary = read_json(tmp_path / "summary.json")
    assert (summary["ended"], summary["reason"]) == ("failed", f"CorruptionError: {text}")
    assert (summary["steps"], summary["recompute_checks"], summary["recompute_mismatches"]) == (5, 3, 1)
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert (last["kind"], last["step"], last["equal"], last["ranks"]) == ("recompute_check", 5, False, [0])
    log = (tmp_path / "log.txt").read_text()
    assert text in log
    assert "Traceback" not in log
    monkeypatch.undo()  # the device has been replaced
    run(config, tmp_path / "undisturbed", stop=StopRequest(), data_cache=data_cache)
    run(checked(config), tmp_path, stop=StopRequest(), data_cache=data_cache)
    assert content(tmp_path) == content(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (fault_in_forward, "in the loss"),
        (fault_in_backward, "first in the gradient of blocks.1.mixer.up_proj.weight"),
    ],
)
def test_a_flipped_bit_is_reported_on_request_and_the_step_runs(
    config, data_cache, tmp_path, monkeypatch, fault, where
):
    run(config, tmp_path / "without", stop=StopRequest(), data_cache=data_cache)
    monkeypatch.setattr(Trainer, "digests", with_faults(0, {3, 9}, fault))
    reporting = checked(config, recompute_mismatch="report")
    summary = run(reporting, tmp_path / "with", stop=StopRequest(), data_cache=data_cache)
    assert content(tmp_path / "with") == content(tmp_path / "without")
    assert (summary["recompute_checks"], summary["recompute_mismatches"]) == (6, 2)
    found = [record["step"] for record in checks(tmp_path / "with") if not record["equal"]]
    assert found == [3, 9]
    text = f"a micro-batch that was computed twice has different bits, {where}"
    assert {r["reason"] for r in checks(tmp_path / "with") if not r["equal"]} == {text}
    assert f"step 4: {text}" in (tmp_path / "with" / "log.txt").read_text()


@pytest.mark.parametrize("after", [3, 4])
def test_a_run_interrupted_around_a_check_has_the_records_of_a_whole_one(config, data_cache, tmp_path, after):
    run(checked(config), tmp_path / "whole", stop=StopRequest(), data_cache=data_cache)
    stopper = Stopper(after)
    run(checked(config), tmp_path / "cut", listener=stopper, stop=stopper.stop, data_cache=data_cache)
    run(checked(config), tmp_path / "cut", stop=StopRequest(), data_cache=data_cache)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert checks(tmp_path / "cut") == checks(tmp_path / "whole")


def test_the_command_exits_with_1_and_one_line(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Trainer, "digests", with_faults(0, {2}))
    file = written(checked(config), tmp_path)
    assert main(["train", file, "--out", str(tmp_path / "run")]) == 1
    errors = capsys.readouterr().err
    assert errors.count("step 2: a micro-batch that was computed twice has different bits") == 1
    assert "Traceback" not in errors
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ended"] == "failed"
    assert (tmp_path / "run" / "report.html").is_file()
