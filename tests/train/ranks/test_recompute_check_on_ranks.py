"""The check for silent corruption on several ranks: no false report, and the rank at fault is named."""

import json
import platform
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fourbits.settings import override
from fourbits.train.checkpoint import open_checkpoint
from fourbits.train.metrics import read_metrics
from support.torchrun import PATIENCE, command_of, environment, timeless, torchrun, written
from train.ranks.test_resharding import contents
from train.ranks.test_tensor_parallel import MODEL

pytestmark = pytest.mark.slow
#: where the faulty script stands
TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def short(config):
    """Four steps of four micro-batches, every second one checked, in a recipe with state."""
    changes = {"train.steps": 4, "train.gradient_accumulation": 4, "train.checkpoint_interval": 2}
    changes |= {"train.recompute_check_interval": 2, "recipe.fprop.lhs.amax_policy": "history"}
    return override(config, changes)


def faulty(ranks, rank, computations, words):
    """Train with ranks of which one has faults."""
    command = command_of(ranks, [])
    script = [str(TESTS / "support" / "corruption.py"), str(rank), ",".join(map(str, computations)), *words]
    path = {"PYTHONPATH": str(TESTS)}
    return subprocess.run(
        [*command[: command.index("-m", 2)], *script],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment() | path,
    )


def checks(out):
    return [r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "recompute_check"]


@pytest.mark.parametrize(("setting", "value"), [("accumulate", "sharded"), ("reshard", "step")])
def test_a_check_on_two_ranks_changes_no_bit_and_is_silent(short, tmp_path, setting, value):
    short = override(short, {f"parallel.{setting}": value})
    for out, interval in (("with", 2), ("without", None)):
        file = written(override(short, {"train.recompute_check_interval": interval}), tmp_path)
        ended = torchrun(2, ["train", file, "--out", str(tmp_path / out)])
        assert ended.returncode == 0, ended.stderr
    assert [(r["step"], r["equal"]) for r in checks(tmp_path / "with")] == [(1, True), (3, True)]
    states = [contents(open_checkpoint(tmp_path / out / "checkpoints/step_4")) for out in ("with", "without")]
    assert all(tensor.equal(states[1][key]) for key, tensor in states[0].items())
    others = [r for r in timeless(tmp_path / "with") if r["kind"] != "recompute_check"]
    assert others == timeless(tmp_path / "without")


def test_copies_of_ranks_that_share_layers_have_equal_bits(short, tmp_path):
    """Four ranks: two that share layers, twice. Each computes what its counterpart in the other copy does."""
    shared = replace(short, model=MODEL, recipe=override(short.recipe, {"fprop.lhs.amax_policy": "current"}))
    file = written(override(shared, {"parallel.tensor": 2, "parallel.replicate": 2}), tmp_path)
    ended = torchrun(4, ["train", file, "--out", str(tmp_path / "run")])
    assert ended.returncode == 0, ended.stderr
    assert [(r["step"], r["equal"]) for r in checks(tmp_path / "run")] == [(1, True), (3, True)]


def test_the_rank_with_a_flipped_bit_is_named_and_all_end_before_the_step(short, tmp_path):
    """The second of its two computations before step 4."""
    ended = faulty(2, 1, [4], ["train", written(short, tmp_path), "--out", str(tmp_path / "run")])
    assert ended.returncode != 0
    text = f"rank 1 on {platform.node()} is at fault"
    assert len(re.findall(f"step 4: ranks have different bits.*{re.escape(text)}", ended.stderr)) == 1
    assert "Bits were last equal at step 2" in ended.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["ended"], summary["steps"], summary["recompute_mismatches"]) == ("failed", 3, 1)
    assert [(r["step"], r["equal"], r.get("ranks")) for r in checks(tmp_path / "run")] == [
        (1, True, None),
        (3, False, [1]),
    ]
    again = torchrun(2, ["train", written(short, tmp_path), "--out", str(tmp_path / "run")])
    assert again.returncode == 0, again.stderr
    assert [record["equal"] for record in checks(tmp_path / "run")] == [True, True]


@pytest.mark.parametrize(("ranks", "named"), [(2, []), (4, [2])])
def test_a_rank_that_is_always_wrong_is_named_by_a_majority_of_others(short, tmp_path, ranks, named):
    """If two ranks each agree with themselves, it is unknown which is wrong."""
    file = written(override(short, {"train.recompute_mismatch": "report"}), tmp_path)
    rank = ranks // 2
    ended = faulty(ranks, rank, range(1, 9), ["train", file, "--out", str(tmp_path / "run")])
    assert ended.returncode == 0, ended.stderr
    assert [record["ranks"] for record in checks(tmp_path / "run")] == [named, named]
    log = (tmp_path / "run" / "log.txt").read_text()
    verdict = f"rank {rank} on {platform.node()} is at fault" if named else "it is unknown which are wrong"
    assert log.count(verdict) == 2


def test_ranks_with_other_numbers_of_threads_are_compared_with_themselves_only(short, tmp_path):
    """Sums over threads have other orders, so equal bits of two ranks would be luck."""
    script = tmp_path / "threads.py"
    script.write_text(
        "import os, sys, torch\n"
        "from fourbits.cli.main import main\n"
        "torch.set_num_threads(1 + int(os.environ['RANK']))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    file = written(override(short, {"train.threads": None}), tmp_path)
    command = command_of(2, [])
    words = ["train", file, "--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [*command[: command.index("-m", 2)], str(script), *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(),
    )
    assert ended.returncode == 0, ended.stderr
    assert "each rank is compared with itself only" in (tmp_path / "run" / "log.txt").read_text()
    assert [record["equal"] for record in checks(tmp_path / "run")] == [True, True]
