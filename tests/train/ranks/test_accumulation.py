"""What ranks keep during a step: gradients, unsharded or in shards, and gathered weights."""

import pytest

from fourbits.settings import override
from support.torchrun import timeless, torchrun, written

pytestmark = pytest.mark.slow


def test_a_step_has_the_gradients_of_either_way_to_add(config, tmp_path):
    changes = {"train.steps": 1, "train.gradient_accumulation": 4, "train.validation_interval": None}
    found = {}
    for way in ("unsharded", "sharded"):
        file = written(override(config, {**changes, "parallel.accumulate": way}), tmp_path)
        ended = torchrun(2, ["train", file, "--out", str(tmp_path / way)])
        assert ended.returncode == 0, ended.stderr
        found[way] = next(record for record in timeless(tmp_path / way) if record["kind"] == "train")
    norms = [record.pop("grad_norm") for record in found.values()]
    assert found["unsharded"] == found["sharded"]
    # two FP32 additions per element, each off by half a unit in the last place at most
    assert norms[0] == pytest.approx(norms[1], rel=2**-22)


@pytest.mark.parametrize("gather", ["packed", "masters"])
def test_weights_kept_for_a_step_are_those_of_the_step(config, tmp_path, gather):
    """Evaluations between steps gather weights, too, which the optimizer then changes."""
    changes = {
        "train.steps": 3,
        "train.gradient_accumulation": 4,
        "train.validation_interval": 1,
        "parallel.gather": gather,
    }
    found = {}
    for reshard in ("pass", "step"):
        file = written(override(config, {**changes, "parallel.reshard": reshard}), tmp_path)
        ended = torchrun(2, ["train", file, "--out", str(tmp_path / reshard)])
        assert ended.returncode == 0, ended.stderr
        found[reshard] = timeless(tmp_path / reshard)
    assert found["pass"] == found["step"]
    assert {record["kind"] for record in found["step"]} >= {"train", "validation"}
