"""A checkpoint moves from 1 to 2 to 4 ranks and back, and is the same state on each."""

import pytest

from fourbits.exchange.tensor_pieces import TensorPieces
from fourbits.settings import override
from fourbits.train.checkpoint import open_checkpoint
from fourbits.train.run import run
from fourbits.train.stop import StopRequest
from support.torchrun import timeless, torchrun, written

pytestmark = pytest.mark.slow


def contents(checkpoint):
    """All tensors of a checkpoint, by part and name, whatever its files."""
    parts = {name.split("/")[0].removesuffix(".safetensors") for name in checkpoint.files}
    found = {}
    for part in parts:
        files = [
            checkpoint.path / name for name in checkpoint.files if name.startswith((f"{part}/", f"{part}."))
        ]
        stored = TensorPieces(files)
        found |= {f"{part}: {name}": stored[name] for name in stored}
    return found


@pytest.fixture(scope="module")
def tracked(config):
    """A recipe with state, so that all three parts of a checkpoint exist; four micro-batches."""
    changes = {"train.steps": 4, "train.checkpoint_interval": 2, "train.keep_checkpoints": 9}
    changes |= {"train.gradient_accumulation": 4, "recipe.fprop.lhs.amax_policy": "history"}
    return override(config, changes)


def test_a_state_is_the_same_on_1_2_4_and_1_ranks(tracked, data_cache, tmp_path):
    run(tracked, tmp_path / "1", stop=StopRequest(), data_cache=data_cache)
    file, before = written(tracked, tmp_path), tmp_path / "1"
    for ranks in (2, 4):
        words = ["train", file, "--out", str(tmp_path / f"{ranks}"), "--from", f"{before}/checkpoints/step_2"]
        ended = torchrun(ranks, words)
        assert ended.returncode == 0, ended.stderr
        before = tmp_path / f"{ranks}"
    last = before / "checkpoints/step_2"
    run(tracked, tmp_path / "end", stop=StopRequest(), data_cache=data_cache, start_from=last)
    states = [
        contents(open_checkpoint(tmp_path / out / "checkpoints/step_2")) for out in ("1", "2", "4", "end")
    ]
    assert len({key.split(":")[0] for key in states[0]}) == 3
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(tensor.equal(state[key]) for key, tensor in states[0].items())
    assert timeless(tmp_path / "end") == timeless(tmp_path / "1")
