"""A recipe that tracks its operands continues from a checkpoint as if it had not been stopped."""

from dataclasses import replace

import torch

from fourbits.quant.request import ROLES
from fourbits.recipe.presets import get_recipe
from fourbits.settings import override
from fourbits.train.checkpoint import open_checkpoint, save_checkpoint
from fourbits.train.opening import with_vocabulary
from fourbits.train.trainer import Trainer
from support.assertions import assert_same_bytes


def test_a_resumed_run_uses_the_amaxes_and_layouts_of_the_one_before(config, data, tmp_path):
    changes = {f"{role}.amax_policy": "history" for role in ROLES[:6]}
    changes |= {"fprop.rhs.adaptive": "block", "dgrad.rhs.adaptive": "block"}
    changed = replace(config, recipe=override(get_recipe("nvfp4"), changes))
    whole, resumed = (Trainer(with_vocabulary(changed, data), data, torch.device("cpu")) for _ in range(2))
    for _ in range(2):
        whole.run_step()
    folder = save_checkpoint(tmp_path, 2, whole.tensors(), {})
    resumed.resume(open_checkpoint(folder))
    shares = [trainer.check(trainer.run_step()).saturated for trainer in (whole, resumed)]
    assert shares[0] is not None
    assert shares[0] == shares[1]
    for file, tensors in whole.tensors().items():
        for name, tensor in tensors.items():
            assert_same_bytes(resumed.tensors()[file][name], tensor, name)
    assert whole.tensors()["recipe"]["step"] == 2


def test_a_step_reports_the_share_of_blocks_whose_scale_saturated(config, data):
    """Under a quarter of the maxima of the step before, some blocks of X saturate; the first uses its own."""
    changes = {"fprop.lhs.amax_policy": "delayed", "fprop.lhs.amax_headroom": 0.25}
    changed = replace(config, recipe=override(get_recipe("nvfp4"), changes))
    trainer = Trainer(with_vocabulary(changed, data), data, torch.device("cpu"))
    first, second = (trainer.check(trainer.run_step()) for _ in range(2))
    assert first.saturated == 0.0
    assert second.saturated is not None
    tensors = trainer.tensors()["recipe"]
    saturated, blocks = (
        sum(int(x.sum()) for name, x in tensors.items() if name.endswith(f".{field}"))
        for field in ("saturated", "blocks")
    )
    assert saturated > 0
    assert second.saturated == torch.tensor(2 * saturated / blocks).item()  # all of them in one of two steps


def test_a_step_that_counts_no_blocks_reports_none(config, data):
    trainer = Trainer(
        with_vocabulary(replace(config, recipe=get_recipe("nvfp4")), data), data, torch.device("cpu")
    )
    assert trainer.check(trainer.run_step()).saturated is None
